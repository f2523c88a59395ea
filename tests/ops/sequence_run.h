// SPDX-License-Identifier: Apache-2.0
// A case that a test may feed with another case's data and read row by row, whatever its layout.
#pragma once

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "cases/inputs/inputs.h"
#include "cases/line/case.h"
#include "cpu/reference/number.h"
#include "cpu/reference/sequences.h"
#include "tessera/executor.h"

namespace tessera::test {

/// Which sequence and head of another run the data of (batch, head) come from.
struct Source {
  std::int64_t batch, head;
};

class SequenceRun {
 public:
  explicit SequenceRun(const std::string& line)
      : case_(cases::Case::parse(line)),
        inputs_(case_),
        sequences_(reference::resolve_sequences(case_.problem, inputs_.bindings())) {}

  [[nodiscard]] const Problem& problem() const { return case_.problem; }
  [[nodiscard]] Bindings& bindings() { return inputs_.bindings(); }
  [[nodiscard]] cases::Inputs& inputs() { return inputs_; }
  [[nodiscard]] std::int64_t query_length(std::int64_t b) const { return query(b).length; }
  [[nodiscard]] std::int64_t key_length(std::int64_t b) const { return keys(b).length; }

  void run() { run(case_.threads); }
  void run(int threads) {
    inputs_.restore();
    const Plan plan = make_plan(case_.problem, Target::cpu(threads, case_.isa), case_.wishes);
    cases::PoisonedMemory workspace(plan.workspace_bytes());
    std::memset(workspace.data(), 0x7E, workspace.size());  // numbers, large ones: unlike NaN they can win a maximum
    Executor(plan, workspace.data(), workspace.size()).run(inputs_.bindings());
  }

  /// Elements of row i of head h of sequence b in a q-shaped tensor.
  [[nodiscard]] std::vector<double> query_row(Slot slot, std::int64_t b, std::int64_t i, std::int64_t h) const {
    return row(slot, query(b).first_token + i, h);
  }
  void set_query_row(Slot slot, std::int64_t b, std::int64_t i, std::int64_t h, const std::vector<double>& values) {
    set_row(slot, query(b).first_token + i, h, values);
  }
  /// The same of key j in a tensor like k or v.
  [[nodiscard]] std::vector<double> key_row(Slot slot, std::int64_t b, std::int64_t j, std::int64_t h) const {
    return row(slot, key_token(b, j), h);
  }
  void set_key_row(Slot slot, std::int64_t b, std::int64_t j, std::int64_t h, const std::vector<double>& values) {
    set_row(slot, key_token(b, j), h, values);
  }
  [[nodiscard]] double lse(Slot slot, std::int64_t b, std::int64_t i, std::int64_t h) const {
    const Tensor& tensor = inputs_.bindings()[slot];
    return reference::read(tensor, reference::lse_offset(tensor, b, h, query(b), i));
  }
  /// Of slopes that all sequences share.
  void set_alibi_slope(std::int64_t h, double value) {
    const Tensor& tensor = inputs_.bindings()[Slot::alibi_slopes];
    reference::write(tensor, h * tensor.strides[0], value);
  }
  void set_lse(Slot slot, std::int64_t b, std::int64_t i, std::int64_t h, double value) {
    const Tensor& tensor = inputs_.bindings()[slot];
    reference::write(tensor, reference::lse_offset(tensor, b, h, query(b), i), value);
  }

  /// Copies every input row that both have; `from(b, h)` names the source of a query head, `from_kv` of a KV head.
  template <class From, class FromKv>
  void copy_inputs(const SequenceRun& other, From from, FromKv from_kv) {
    const bool backward = problem().pass == Pass::backward;
    for (std::int64_t b = 0; b < problem().batch; ++b) {
      for (std::int64_t h = 0; h < problem().heads_q; ++h) {
        const Source source = from(b, h);
        for (std::int64_t i = 0; i < std::min(query_length(b), other.query_length(source.batch)); ++i) {
          for (const Slot slot : {Slot::q, Slot::dout, Slot::o}) {
            if (slot != Slot::q && !backward) continue;
            set_query_row(slot, b, i, h, other.query_row(slot, source.batch, i, source.head));
          }
          if (backward) set_lse(Slot::lse, b, i, h, other.lse(Slot::lse, source.batch, i, source.head));
        }
      }
      for (std::int64_t h = 0; h < problem().heads_kv; ++h) {
        const Source source = from_kv(b, h);
        for (std::int64_t j = 0; j < std::min(key_length(b), other.key_length(source.batch)); ++j) {
          for (const Slot slot : {Slot::k, Slot::v}) {
            set_key_row(slot, b, j, h, other.key_row(slot, source.batch, j, source.head));
          }
        }
      }
    }
    inputs_.remember();
  }
  void copy_inputs(const SequenceRun& other) {
    const auto same = [](std::int64_t b, std::int64_t h) { return Source{b, h}; };
    copy_inputs(other, same, same);
  }
  /// Data set by hand are kept by the next run.
  void remember() { inputs_.remember(); }

  /// Rows [0, length) of every head of sequence b in a q-shaped tensor, one after another.
  [[nodiscard]] std::vector<double> query_rows(Slot slot, std::int64_t b, std::int64_t length) const {
    std::vector<double> all;
    for (std::int64_t i = 0; i < length; ++i) {
      for (std::int64_t h = 0; h < problem().heads_q; ++h) append(all, query_row(slot, b, i, h));
    }
    return all;
  }
  [[nodiscard]] std::vector<double> query_rows(Slot slot, std::int64_t b) const {
    return query_rows(slot, b, query_length(b));
  }
  [[nodiscard]] std::vector<double> lse_rows(std::int64_t b, std::int64_t length) const {
    std::vector<double> all;
    for (std::int64_t i = 0; i < length; ++i) {
      for (std::int64_t h = 0; h < problem().heads_q; ++h) all.push_back(lse(Slot::lse, b, i, h));
    }
    return all;
  }
  [[nodiscard]] std::vector<double> lse_rows(std::int64_t b) const { return lse_rows(b, query_length(b)); }
  [[nodiscard]] std::vector<double> key_rows(Slot slot, std::int64_t b) const {
    std::vector<double> all;
    for (std::int64_t j = 0; j < key_length(b); ++j) {
      for (std::int64_t h = 0; h < problem().heads_kv; ++h) append(all, key_row(slot, b, j, h));
    }
    return all;
  }

 private:
  static void append(std::vector<double>& to, const std::vector<double>& from) {
    to.insert(to.end(), from.begin(), from.end());
  }
  [[nodiscard]] const reference::Rows& query(std::int64_t b) const {
    return sequences_.query[static_cast<std::size_t>(b)];
  }
  [[nodiscard]] const reference::Rows& keys(std::int64_t b) const {
    return sequences_.keys[0][static_cast<std::size_t>(b)];
  }
  [[nodiscard]] std::int64_t key_token(std::int64_t b, std::int64_t j) const {
    return reference::key_token(case_.problem, inputs_.bindings(), 0, b, keys(b), j);
  }
  [[nodiscard]] std::vector<double> row(Slot slot, std::int64_t token, std::int64_t head) const {
    const Tensor& tensor = inputs_.bindings()[slot];
    std::vector<double> values(static_cast<std::size_t>(tensor.shape[static_cast<std::size_t>(tensor.rank - 1)]));
    const std::int64_t at = reference::token_offset(tensor, token, head);
    for (std::size_t c = 0; c < values.size(); ++c) {
      values[c] = reference::read(tensor, at + static_cast<std::int64_t>(c));
    }
    return values;
  }
  void set_row(Slot slot, std::int64_t token, std::int64_t head, const std::vector<double>& values) {
    const Tensor& tensor = inputs_.bindings()[slot];
    const std::int64_t at = reference::token_offset(tensor, token, head);
    for (std::size_t c = 0; c < values.size(); ++c) {
      reference::write(tensor, at + static_cast<std::int64_t>(c), values[c]);
    }
  }

  cases::Case case_;
  cases::Inputs inputs_;
  reference::Sequences sequences_;
};

/// Every bit, so that NaN equals itself and −0 is not 0.
inline bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0);
}

inline double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double largest = a.size() == b.size() ? 0 : std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    if (a[i] != b[i]) largest = std::max(largest, std::isnan(a[i] - b[i]) ? 1e300 : std::fabs(a[i] - b[i]));
  }
  return largest;
}

}  // namespace tessera::test
