// SPDX-License-Identifier: Apache-2.0
#include "command/run_problem.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <set>
#include <sstream>
#include <utility>

#include "bindings/slot_rules.h"
#include "problem/operation.h"
#include "tessera/error.h"

namespace tessera::cli {
namespace {

using files::Array;

bool contains(std::initializer_list<Slot> slots, Slot slot) {
  return std::find(slots.begin(), slots.end(), slot) != slots.end();
}

// The user's words, and the line that is being made of them.
class Line {
 public:
  explicit Line(const std::string& text) {
    std::istringstream words(text);
    bool first = true;
    for (std::string word; words >> word; first = false) {
      const auto is_word = [&word](const detail::OperationRules* known) { return known->name == word; };
      if (first && std::ranges::any_of(detail::operations(), is_word)) {
        operation_ = word;
        continue;
      }
      keys_.insert(word.substr(0, word.find('=')));
      given_ += " " + word;
      if (word == "pass=backward") backward_ = true;
    }
  }
  /// Adds key=value, or a flag when the value is empty, unless the user gave the key.
  void add(const std::string& key, const std::string& value = {}) {
    if (keys_.insert(key).second) derived_ += " " + key + (value.empty() ? "" : "=" + value);
  }
  void add(const std::string& key, std::int64_t value) { add(key, std::to_string(value)); }
  [[nodiscard]] const std::string& operation() const { return operation_; }
  [[nodiscard]] bool backward() const { return backward_; }
  [[nodiscard]] bool has(const std::string& key) const { return keys_.count(key) != 0; }
  [[nodiscard]] std::string text() const { return operation_ + derived_ + given_; }

 private:
  std::string operation_ = "attention";
  std::set<std::string> keys_;
  std::string given_;
  std::string derived_;
  bool backward_ = false;
};

[[noreturn]] void fail(Slot slot, const std::string& got, const std::string& want) {
  throw Error(ErrorCode::invalid_argument, std::string(to_string(slot)), got, want);
}

const Array& need(const Arrays& arrays, Slot slot) {
  const auto found = arrays.find(slot);
  if (found == arrays.end()) fail(slot, "no tensor", "one, by --in");
  return found->second;
}

bool has(const Arrays& arrays, Slot slot) { return arrays.count(slot) != 0; }

std::int64_t dimension(const Arrays& arrays, Slot slot, std::size_t rank, std::size_t axis) {
  const Array& array = need(arrays, slot);
  if (array.shape().size() != rank) fail(slot, array.tensor().describe(), fmt::format("{} dimensions", rank));
  return array.shape()[axis];
}

// int32 values of a vector of metadata.
std::vector<std::int64_t> integers(const Arrays& arrays, Slot slot) {
  const Array& array = need(arrays, slot);
  if (array.dtype() != DType::int32 || array.shape().size() != 1) {
    fail(slot, array.tensor().describe(), "int32 of one dimension");
  }
  const auto* values = array.tensor().as<std::int32_t>();
  return {values, values + array.shape()[0]};
}

std::int64_t longest_step(const std::vector<std::int64_t>& ends) {
  std::int64_t longest = 0;
  for (std::size_t at = 1; at < ends.size(); ++at) longest = std::max(longest, ends[at] - ends[at - 1]);
  return longest;
}

std::int64_t largest(const std::vector<std::int64_t>& values) {
  return values.empty() ? 0 : std::max<std::int64_t>(0, *std::max_element(values.begin(), values.end()));
}

// (tokens, heads, dim) becomes (1, tokens, heads, dim).
void add_batch(Arrays& arrays, Slot slot) {
  const auto found = arrays.find(slot);
  if (found == arrays.end() || found->second.shape().size() >= 4) return;
  std::vector<std::int64_t> shape = found->second.shape();
  shape.insert(shape.begin(), 1);
  Array whole(found->second.dtype(), shape, to_string(slot));
  std::memcpy(whole.data(), found->second.data(), whole.size_bytes());
  found->second = std::move(whole);
}

// Batch, rows and the layout of `slot` (q, or k_new), whose sizes a (tokens | batch, rows), heads, dim tensor gives.
bool add_query_sizes(Arrays& arrays, Line& line, Slot slot, std::initializer_list<Slot> alike) {
  const bool linear = line.operation() == "linear_chunk";
  const std::string length = linear ? "t" : "sq";
  if (has(arrays, Slot::cu_seqlens_q)) {
    const std::vector<std::int64_t> ends = integers(arrays, Slot::cu_seqlens_q);
    linear ? line.add("varlen") : line.add("layout", "varlen");
    line.add("b", std::max<std::int64_t>(0, static_cast<std::int64_t>(ends.size()) - 1));
    line.add(length, longest_step(ends));
    line.add("tq", dimension(arrays, slot, 3, 0));
    return false;
  }
  const bool without_batch = need(arrays, slot).shape().size() == 3;
  if (without_batch) {
    for (const Slot each : alike) add_batch(arrays, each);
  }
  line.add("b", dimension(arrays, slot, 4, 0));
  line.add(length, dimension(arrays, slot, 4, 1));
  return without_batch;
}

void add_paged_sizes(const Arrays& arrays, Line& line, const detail::SourceSlots& slots, const std::string& suffix) {
  const std::int64_t page = dimension(arrays, slots.k, 4, 1);
  line.add("page" + suffix, page);
  line.add("pages" + suffix, dimension(arrays, slots.k, 4, 0));
  if (has(arrays, slots.page_table)) {
    line.add("kv" + suffix, "table");
    const std::int64_t capacity = dimension(arrays, slots.page_table, 2, 1) * page;
    // The cache of an append grows, so its capacity counts; else the longest length in use does.
    line.add("sk" + suffix, line.operation() == "kv_append" ? capacity : largest(integers(arrays, slots.seqused)));
  } else {
    line.add("kv" + suffix, "csr");
    line.add("sk" + suffix, longest_step(integers(arrays, slots.page_indptr)) * page);
  }
}

bool add_key_sizes(Arrays& arrays, Line& line, bool second) {
  const detail::SourceSlots& slots = detail::source_slots(second);
  const std::string suffix = second ? "2" : "";
  bool without_batch = false;
  if (has(arrays, slots.page_table) || has(arrays, slots.page_indptr)) {
    add_paged_sizes(arrays, line, slots, suffix);
  } else if (has(arrays, slots.cu_seqlens)) {
    line.add("kv" + suffix, "varlen");
    line.add("sk" + suffix, longest_step(integers(arrays, slots.cu_seqlens)));
    line.add("tk" + suffix, dimension(arrays, slots.k, 3, 0));
  } else {
    without_batch = need(arrays, slots.k).shape().size() == 3;
    if (without_batch) {
      for (const Slot each : {slots.k, slots.v, slots.dk, slots.dv}) add_batch(arrays, each);
    }
    line.add("kv" + suffix, "dense");
    line.add("sk" + suffix, dimension(arrays, slots.k, 4, 1));
  }
  const bool implied = has(arrays, slots.page_table) || line.operation() == "kv_append";
  if (has(arrays, slots.seqused) && !implied) line.add("seqused_k" + suffix);
  return without_batch;
}

std::string type_of(const Arrays& arrays, Slot slot) { return std::string(to_string(need(arrays, slot).dtype())); }

void add_types(const Arrays& arrays, Line& line, Slot q) {
  const std::string of_q = size_of(need(arrays, q).dtype()) == 1 ? "bf16" : type_of(arrays, q);
  const std::string o = has(arrays, Slot::o) ? type_of(arrays, Slot::o) : of_q;
  line.add("dtype",
           fmt::format("{}:{}:{}:{}", type_of(arrays, q), type_of(arrays, Slot::k), type_of(arrays, Slot::v), o));
}

void add_flags(const Arrays& arrays, Line& line) {
  for (const auto& [slot, key] : std::initializer_list<std::pair<Slot, const char*>>{{Slot::seqused_q, "seqused_q"},
                                                                                     {Slot::sink, "sink"},
                                                                                     {Slot::alibi_slopes, "alibi"},
                                                                                     {Slot::dlse, "dlse"},
                                                                                     {Slot::k_mean, "smooth"}}) {
    if (has(arrays, slot)) line.add(key);
  }
  if (has(arrays, Slot::prior_lse) && (line.has("mass") || line.has("next"))) line.add("mass_lse", "prior");
}

void add_heads(const Arrays& arrays, Line& line, Slot q) {
  const std::vector<std::int64_t>& q_shape = need(arrays, q).shape();
  const std::vector<std::int64_t>& k_shape = need(arrays, Slot::k).shape();
  const std::vector<std::int64_t>& v_shape = need(arrays, Slot::v).shape();
  if (k_shape.size() < 3) fail(Slot::k, need(arrays, Slot::k).tensor().describe(), "3 or 4 dimensions");
  if (v_shape.size() < 3) fail(Slot::v, need(arrays, Slot::v).tensor().describe(), "3 or 4 dimensions");
  line.add("hq", q_shape[q_shape.size() - 2]);
  line.add("hkv", k_shape[k_shape.size() - 2]);
  line.add("d", k_shape.back());
  line.add("dv", v_shape.back());
}

RunProblem combine_of(Arrays& arrays, Line& line) {
  const Array& parts = need(arrays, Slot::o_parts);
  const std::vector<std::int64_t>& shape = parts.shape();
  if (shape.size() != 5) fail(Slot::o_parts, parts.tensor().describe(), "(parts, batch, rows, heads, dim)");
  line.add("parts", shape[0]);
  line.add("b", shape[1]);
  line.add("sq", shape[2]);
  line.add("hq", shape[3]);
  line.add("d", shape[4]);
  line.add("dtype", std::string(to_string(parts.dtype())));
  if (has(arrays, Slot::sink)) line.add("sink");
  RunProblem result;
  result.problem = Problem::parse(line.text());
  return result;
}

// Waiting tokens are put into the states where there are no others: of what a step has only the rings are given.
RunProblem linear_flush_of(const Arrays& arrays, Line& line) {
  const std::vector<std::int64_t>& shape = need(arrays, Slot::ring_k).shape();
  line.add("ring", dimension(arrays, Slot::ring_k, 4, 2) / 2);
  line.add("b", dimension(arrays, Slot::ring_cursor, 1, 0));
  line.add("t", 0);
  line.add("h", shape[1]);
  line.add("d", shape[3]);
  line.add("dv", dimension(arrays, Slot::ring_v, 4, 3));
  line.add("slots", dimension(arrays, Slot::state, 4, 0));
  line.add("state", std::string(to_string(need(arrays, Slot::state).dtype())));
  const auto type = [&arrays](Slot slot) { return to_string(need(arrays, slot).dtype()); };
  line.add("dtype", fmt::format("{0}:{0}:{1}:{0}", type(Slot::ring_k), type(Slot::ring_v)));
  RunProblem result;
  result.problem = Problem::parse(line.text());
  return result;
}

// q and v give the sizes, the state its type and the pool's size; its layout is the user's word.
RunProblem linear_decode_of(const Arrays& arrays, Line& line) {
  if (!has(arrays, Slot::q) && has(arrays, Slot::ring_k)) return linear_flush_of(arrays, line);
  if (has(arrays, Slot::ring_k)) line.add("ring", dimension(arrays, Slot::ring_k, 4, 2) / 2);
  const std::vector<std::int64_t>& shape = need(arrays, Slot::q).shape();
  dimension(arrays, Slot::q, 4, 0);
  line.add("b", shape[0]);
  line.add("t", shape[1]);
  line.add("h", shape[2]);
  line.add("d", shape[3]);
  line.add("dv", dimension(arrays, Slot::v, 4, 3));
  line.add("slots", dimension(arrays, Slot::state, 4, 0));
  line.add("state", std::string(to_string(need(arrays, Slot::state).dtype())));
  const auto type = [&arrays](Slot slot) { return to_string(need(arrays, slot).dtype()); };
  line.add("dtype", fmt::format("{}:{}:{}:{}", type(Slot::q), type(Slot::k), type(Slot::v), type(Slot::q)));
  RunProblem result;
  result.problem = Problem::parse(line.text());
  return result;
}

// As linear_decode, for sequences of any length, packed ones too, and without a pool of states if none is given.
RunProblem linear_chunk_of(Arrays& arrays, Line& line) {
  RunProblem result;
  result.q_without_batch = result.kv_without_batch =
      add_query_sizes(arrays, line, Slot::q, {Slot::q, Slot::k, Slot::v, Slot::dout});
  const std::vector<std::int64_t>& shape = need(arrays, Slot::q).shape();
  line.add("h", shape[shape.size() - 2]);
  line.add("d", shape.back());
  line.add("dv", dimension(arrays, Slot::v, shape.size(), shape.size() - 1));
  if (has(arrays, Slot::state)) {
    line.add("slots", dimension(arrays, Slot::state, 4, 0));
    line.add("state", type_of(arrays, Slot::state));
  }
  const Slot o = line.backward() ? Slot::dout : Slot::q;
  line.add("dtype", fmt::format("{}:{}:{}:{}", type_of(arrays, Slot::q), type_of(arrays, Slot::k),
                                type_of(arrays, Slot::v), type_of(arrays, o)));
  result.problem = Problem::parse(line.text());
  return result;
}

}  // namespace

bool is_input(Slot slot, const std::string& text) {
  const Line line(text);
  if (contains({Slot::dq, Slot::dk, Slot::dv, Slot::dk2, Slot::dv2, Slot::dsink}, slot)) return line.has("accumulate");
  if (contains({Slot::o, Slot::o_residual, Slot::lse, Slot::dlse}, slot))
    return line.backward() && line.operation() == "attention";
  if (slot == Slot::dout) return line.backward();
  if (contains({Slot::next_counts, Slot::next_indices, Slot::next_bits, Slot::tile_mass, Slot::q_rotated,
                Slot::dstate_initial, Slot::status, Slot::count_},
               slot)) {
    return false;
  }
  return true;
}

RunProblem problem_of(Arrays& arrays, const std::string& text) {
  Line line(text);
  if (line.operation() == "combine") return combine_of(arrays, line);
  if (line.operation() == "linear_decode") return linear_decode_of(arrays, line);
  if (line.operation() == "linear_chunk") return linear_chunk_of(arrays, line);
  if (line.operation().substr(0, 4) == "nsa_") {
    throw Error(ErrorCode::unsupported, "operation", std::string(line.operation()),
                "attention, combine, kv_append, linear_decode or linear_chunk; tessera.nsa of Python has these");
  }
  if (line.operation() == "quantize") {
    throw Error(ErrorCode::unsupported, "operation", "quantize",
                "attention, combine, kv_append, linear_decode or linear_chunk; tessera.quantize of Python has it");
  }
  const bool append = line.operation() == "kv_append";
  const Slot q = append ? Slot::k_new : Slot::q;
  RunProblem result;
  result.q_without_batch = append ? add_query_sizes(arrays, line, q, {Slot::k_new, Slot::v_new, Slot::q})
                                  : add_query_sizes(arrays, line, q, {Slot::q, Slot::o, Slot::dout, Slot::dq});
  if (result.q_without_batch) {
    for (const Slot slot : {Slot::lse, Slot::dlse, Slot::prior_lse}) {
      if (has(arrays, slot) && arrays[slot].shape().size() == 2) add_batch(arrays, slot);
    }
  }
  result.kv_without_batch = add_key_sizes(arrays, line, false);
  if (has(arrays, Slot::k2)) add_key_sizes(arrays, line, true);
  add_heads(arrays, line, append && has(arrays, Slot::q) ? Slot::q : q);
  add_types(arrays, line, q);
  add_flags(arrays, line);
  result.problem = Problem::parse(line.text());
  return result;
}

}  // namespace tessera::cli
