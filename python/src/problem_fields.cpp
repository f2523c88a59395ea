// SPDX-License-Identifier: Apache-2.0
#include "problem_fields.h"

#include <nanobind/stl/string.h>

#include <cmath>
#include <optional>
#include <string>

#include "problem_words.h"
#include "tessera/error.h"

namespace nb = nanobind;

namespace tessera::python {
namespace {

[[noreturn]] void reject(std::string_view name, nb::handle value, std::string_view want) {
  constexpr std::size_t kLongest = 80;
  std::string got = nb::cast<std::string>(nb::repr(value));
  if (got.size() > kLongest) got = got.substr(0, kLongest) + "…";
  throw Error(ErrorCode::invalid_argument, std::string(name), got, std::string(want));
}

std::string string_of(nb::handle value, std::string_view name, std::string_view want) {
  if (!PyUnicode_Check(value.ptr())) reject(name, value, want);
  return nb::cast<std::string>(value);
}

template <class Value>
  requires std::is_enum_v<Value>
void read(Value& field, nb::handle value, std::string_view name) {
  const std::string want = known_words<Value>();
  const std::optional<Value> found = value_of<Value>(string_of(value, name, want));
  if (!found) reject(name, value, want);
  field = *found;
}
template <class Value>
  requires std::is_enum_v<Value>
nb::object shown(Value field) {
  const std::string_view word = word_of(field);
  if (word.empty()) return nb::none();
  return nb::str(word.data(), word.size());
}

void read(std::int64_t& field, nb::handle value, std::string_view name) {
  const nb::object number = nb::steal(PyNumber_Index(value.ptr()));
  if (!number.is_valid()) {
    PyErr_Clear();
    reject(name, value, "an integer");
  }
  int overflow = 0;
  field = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (overflow != 0) reject(name, value, "an integer that fits in 64 bits");
}
nb::object shown(std::int64_t field) { return nb::int_(field); }

void read(float& field, nb::handle value, std::string_view name) {
  const double number = PyFloat_AsDouble(value.ptr());
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    reject(name, value, "a number");
  }
  field = static_cast<float>(number);
  const bool lost = (std::isinf(field) && std::isfinite(number)) || (field == 0.0F && number != 0.0);
  if (lost) reject(name, value, "a number that fits in fp32");
}
nb::object shown(float field) { return nb::float_(field); }

void read(bool& field, nb::handle value, std::string_view name) {
  if (!PyBool_Check(value.ptr())) reject(name, value, "True or False");
  field = value.ptr() == Py_True;
}
nb::object shown(bool field) { return nb::bool_(field); }

void read(std::string& field, nb::handle value, std::string_view name) { field = string_of(value, name, "a name"); }
nb::object shown(const std::string& field) {
  if (field.empty()) return nb::none();
  return nb::str(field.data(), field.size());
}

void read(DType& field, nb::handle value, std::string_view name) {
  field = parse_dtype(string_of(value, name, "the name of a dtype, as \"bf16\""), name);
}
nb::object shown(DType field) {
  const std::string_view name = to_string(field);
  return nb::str(name.data(), name.size());
}

/// Whether it is a backward.
void read(Pass& field, nb::handle value, std::string_view name) {
  bool backward = false;
  read(backward, value, name);
  field = backward ? Pass::backward : Pass::forward;
}
nb::object shown(Pass field) { return nb::bool_(field == Pass::backward); }

void read(CompressedCausal& field, nb::handle value, std::string_view name);
nb::object shown(const CompressedCausal& field);
void read(KvSource& field, nb::handle value, std::string_view name);
nb::object shown(const KvSource& field);

template <class Value>
void read(std::optional<Value>& field, nb::handle value, std::string_view name) {
  if (value.is_none()) {
    field.reset();
  } else {
    read(field.emplace(), value, name);
  }
}
template <class Value>
nb::object shown(const std::optional<Value>& field) {
  return field ? shown(*field) : nb::none();
}

/// The members of a tuple or list of `size`.
nb::tuple members(nb::handle value, std::string_view name, std::size_t size, std::string_view want) {
  if (!PyTuple_Check(value.ptr()) && !PyList_Check(value.ptr())) reject(name, value, want);
  nb::tuple all = nb::steal<nb::tuple>(PySequence_Tuple(value.ptr()));
  if (all.size() != size) reject(name, value, want);
  return all;
}

void read(Window& field, nb::handle value, std::string_view name) {
  const nb::tuple ends = members(value, name, 2, "(left, right), each an integer or None");
  read(field.left, ends[0], name);
  read(field.right, ends[1], name);
}
nb::object shown(const Window& field) { return nb::make_tuple(shown(field.left), shown(field.right)); }

void read(CompressedCausal& field, nb::handle value, std::string_view name) {
  const nb::tuple both = members(value, name, 2, "(length, stride), two integers");
  read(field.length, both[0], name);
  read(field.stride, both[1], name);
}
nb::object shown(const CompressedCausal& field) { return nb::make_tuple(shown(field.length), shown(field.stride)); }

void read(TileList& field, nb::handle value, std::string_view name) {
  const nb::tuple all = members(value, name, 4, "(form, heads, whether for each sequence, whether with full tiles)");
  read(field.form, all[0], name);
  read(field.heads, all[1], name);
  read(field.per_batch, all[2], name);
  read(field.full, all[3], name);
}
nb::object shown(const TileList& field) {
  if (!field) return nb::none();
  return nb::make_tuple(shown(field.form), shown(field.heads), shown(field.per_batch), shown(field.full));
}

void read(SkipRule& field, nb::handle value, std::string_view name) {
  const nb::tuple all = members(value, name, 3, "(rule, whether by this step's LSE, growth)");
  read(field.kind, all[0], name);
  read(field.own_lse, all[1], name);
  read(field.growth, all[2], name);
}
nb::object shown(const SkipRule& field) {
  if (!field) return nb::none();
  return nb::make_tuple(shown(field.kind), shown(field.own_lse), shown(field.growth));
}

/// How descales are laid out: "head", "token", or the tokens of a block.
void read(Quantization& field, nb::handle value, std::string_view name) {
  field.block = Quantization{}.block;
  if (PyUnicode_Check(value.ptr())) {
    const auto text = nb::cast<std::string>(value);
    if (text != "head" && text != "token") reject(name, value, "head, token or the tokens of a block");
    field.grain = text == "head" ? Grain::head : Grain::token;
    return;
  }
  field.grain = Grain::block;
  read(field.block, value, name);
}
nb::object shown(const Quantization& field) {
  if (field.grain == Grain::block) return shown(field.block);
  return nb::str(field.grain == Grain::head ? "head" : "token");
}

void read(KvSource& field, nb::handle value, std::string_view name) {
  if (!PyDict_Check(value.ptr())) reject(name, value, "a dict of a source's fields");
  for (const auto& [key, member] : nb::borrow<nb::dict>(value)) {
    const auto text = string_of(key, name, "names of a source's fields");
    const Field<KvSource>* found = field_named(source_fields(), text);
    if (found == nullptr) reject(name, key, "layout, seqlen, total, page_size, pages or seqused");
    if (!member.is_none()) found->set(field, member, std::string(name) + "." + text);
  }
}
nb::object shown(const KvSource& field) {
  nb::dict all;
  for (const Field<KvSource>& member : source_fields()) {
    all[nb::str(member.name.data(), member.name.size())] = member.get(field);
  }
  return all;
}

/// `Access`: from an owner to a reference of its field, wherever in the owner that lies.
template <class Owner, class Access>
Field<Owner> field(std::string_view name, Access /*access*/) {
  return {name, [](Owner& owner, nb::handle value, std::string_view at) { read(Access{}(owner), value, at); },
          [](const Owner& owner) -> nb::object { return shown(Access{}(owner)); }};
}

}  // namespace

#define TESSERA_FIELD(Owner, name, path) field<Owner>(name, [](auto& owner) -> auto& { return owner.path; })

const std::vector<Field<Problem>>& problem_fields() {
  static const std::vector<Field<Problem>> fields{
      TESSERA_FIELD(Problem, "backward", pass),
      TESSERA_FIELD(Problem, "batch", batch),
      TESSERA_FIELD(Problem, "seqlen_q", seqlen_q),
      TESSERA_FIELD(Problem, "total_q", total_q),
      TESSERA_FIELD(Problem, "heads_q", heads_q),
      TESSERA_FIELD(Problem, "heads_kv", heads_kv),
      TESSERA_FIELD(Problem, "head_dim_qk", head_dim_qk),
      TESSERA_FIELD(Problem, "head_dim_v", head_dim_v),
      TESSERA_FIELD(Problem, "q_type", q_type),
      TESSERA_FIELD(Problem, "k_type", k_type),
      TESSERA_FIELD(Problem, "v_type", v_type),
      TESSERA_FIELD(Problem, "o_type", o_type),
      TESSERA_FIELD(Problem, "q_layout", q_layout),
      TESSERA_FIELD(Problem, "seqused_q", seqused_q),
      TESSERA_FIELD(Problem, "kv", kv),
      TESSERA_FIELD(Problem, "kv2", kv2),
      TESSERA_FIELD(Problem, "scale", scale),
      TESSERA_FIELD(Problem, "softcap", softcap),
      TESSERA_FIELD(Problem, "alibi", alibi),
      TESSERA_FIELD(Problem, "score", score),
      TESSERA_FIELD(Problem, "window", window),
      TESSERA_FIELD(Problem, "compressed_causal", compressed_causal),
      TESSERA_FIELD(Problem, "chunk", chunk),
      TESSERA_FIELD(Problem, "mask", mask),
      TESSERA_FIELD(Problem, "sink", sink),
      TESSERA_FIELD(Problem, "dropout", dropout),
      TESSERA_FIELD(Problem, "block_q", block_q),
      TESSERA_FIELD(Problem, "block_kv", block_kv),
      TESSERA_FIELD(Problem, "list", list),
      TESSERA_FIELD(Problem, "bwd_list", bwd_list),
      TESSERA_FIELD(Problem, "next", next),
      TESSERA_FIELD(Problem, "next_threshold", next_threshold),
      TESSERA_FIELD(Problem, "skip", skip),
      TESSERA_FIELD(Problem, "mass", mass),
      TESSERA_FIELD(Problem, "mass_prior_lse", mass_prior_lse),
      TESSERA_FIELD(Problem, "lse", lse),
      TESSERA_FIELD(Problem, "residual", residual),
      TESSERA_FIELD(Problem, "dlse", dlse),
      TESSERA_FIELD(Problem, "grad_fp32", grad_fp32),
      TESSERA_FIELD(Problem, "accumulate", accumulate),
      TESSERA_FIELD(Problem, "deterministic", deterministic),
      TESSERA_FIELD(Problem, "batch_invariant", batch_invariant),
      TESSERA_FIELD(Problem, "metadata", metadata),
      TESSERA_FIELD(Problem, "parts", combine.parts),
      TESSERA_FIELD(Problem, "rotary", append.rotary),
      TESSERA_FIELD(Problem, "rotary_dim", append.rotary_dim),
      TESSERA_FIELD(Problem, "slots", linear.states),
      TESSERA_FIELD(Problem, "state_type", linear.state_type),
      TESSERA_FIELD(Problem, "state_layout", linear.state_layout),
      TESSERA_FIELD(Problem, "ring", linear.ring),
      TESSERA_FIELD(Problem, "rounding", linear.rounding),
      TESSERA_FIELD(Problem, "compress_length", nsa.length),
      TESSERA_FIELD(Problem, "compress_stride", nsa.stride),
      TESSERA_FIELD(Problem, "project", nsa.project),
      TESSERA_FIELD(Problem, "select_block", nsa.block),
      TESSERA_FIELD(Problem, "select_top", nsa.top),
      TESSERA_FIELD(Problem, "select_tile", nsa.tile),
      TESSERA_FIELD(Problem, "select_query_heads", nsa.query_heads),
      TESSERA_FIELD(Problem, "select_score", nsa.score),
      TESSERA_FIELD(Problem, "tile_reduce", nsa.reduce),
      TESSERA_FIELD(Problem, "block_visible", nsa.visible),
      TESSERA_FIELD(Problem, "initial_blocks", nsa.initial),
      TESSERA_FIELD(Problem, "local_blocks", nsa.local),
      TESSERA_FIELD(Problem, "select_causal", nsa.causal),
      TESSERA_FIELD(Problem, "compressed_top", nsa.compressed_top),
      TESSERA_FIELD(Problem, "compressed_block", nsa.compressed_block),
      TESSERA_FIELD(Problem, "gate", nsa.gate),
      TESSERA_FIELD(Problem, "descale", quantization),
      TESSERA_FIELD(Problem, "smooth", quantization.smooth),
      TESSERA_FIELD(Problem, "hadamard", quantization.hadamard),
      TESSERA_FIELD(Problem, "given_descales", quantization.given),
      TESSERA_FIELD(Problem, "counts_saturated", quantization.counts),
  };
  return fields;
}

const std::vector<Field<KvSource>>& source_fields() {
  static const std::vector<Field<KvSource>> fields{
      TESSERA_FIELD(KvSource, "layout", layout), TESSERA_FIELD(KvSource, "seqlen", seqlen),
      TESSERA_FIELD(KvSource, "total", total),   TESSERA_FIELD(KvSource, "page_size", page_size),
      TESSERA_FIELD(KvSource, "pages", pages),   TESSERA_FIELD(KvSource, "seqused", seqused),
  };
  return fields;
}

}  // namespace tessera::python
