// SPDX-License-Identifier: Apache-2.0
// The words that Python has for the values of a problem's enumerations, those of the problem's line (docs/grammar.md).
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "tessera/problem.h"

namespace tessera::python {

template <class Value>
struct ValueWord {
  std::string_view text;
  Value value;
};

template <class Value>
inline constexpr int kWords = 0;  // each enumeration has an array of its own

template <>
inline constexpr ValueWord<Layout> kWords<Layout>[] = {{"dense", Layout::dense}, {"varlen", Layout::varlen}};
template <>
inline constexpr ValueWord<KvLayout> kWords<KvLayout>[] = {{"dense", KvLayout::dense},
                                                           {"varlen", KvLayout::varlen},
                                                           {"table", KvLayout::paged_table},
                                                           {"csr", KvLayout::paged_csr}};
template <>
inline constexpr ValueWord<Rotary> kWords<Rotary>[] = {{"half", Rotary::half}, {"interleaved", Rotary::interleaved}};
template <>
inline constexpr ValueWord<MassKind> kWords<MassKind>[] = {{"mean", MassKind::mean}, {"rms", MassKind::rms}};
template <>
inline constexpr ValueWord<SkipRule::Kind> kWords<SkipRule::Kind>[] = {{"mass", SkipRule::Kind::mass},
                                                                       {"threshold", SkipRule::Kind::threshold}};
template <>
inline constexpr ValueWord<StateLayout> kWords<StateLayout>[] = {{"vk", StateLayout::vk}, {"kv", StateLayout::kv}};
template <>
inline constexpr ValueWord<Rounding> kWords<Rounding>[] = {{"nearest", Rounding::nearest},
                                                           {"stochastic", Rounding::stochastic}};
template <>
inline constexpr ValueWord<SelectScore> kWords<SelectScore>[] = {{"dot", SelectScore::dot},
                                                                 {"softmax", SelectScore::softmax}};
template <>
inline constexpr ValueWord<TileReduce> kWords<TileReduce>[] = {
    {"first", TileReduce::first}, {"mean", TileReduce::mean}, {"max", TileReduce::max}};
template <>
inline constexpr ValueWord<BlockVisible> kWords<BlockVisible>[] = {{"complete", BlockVisible::complete},
                                                                   {"started", BlockVisible::started}};
template <>
inline constexpr ValueWord<GateKind> kWords<GateKind>[] = {
    {"sigmoid", GateKind::sigmoid}, {"given", GateKind::given}, {"mean", GateKind::mean}};
template <>
inline constexpr ValueWord<Metadata> kWords<Metadata>[] = {
    {"trust", Metadata::trust}, {"clamp", Metadata::clamp}, {"report", Metadata::report}};
template <>
inline constexpr ValueWord<TileList::Form> kWords<TileList::Form>[] = {{"indices", TileList::Form::indices},
                                                                       {"bitmask", TileList::Form::bitmask},
                                                                       {"transposed", TileList::Form::transposed}};
template <>
inline constexpr ValueWord<TileList::Heads> kWords<TileList::Heads>[] = {
    {"q", TileList::Heads::q}, {"kv", TileList::Heads::kv}, {"1", TileList::Heads::one}};

/// "" for the value that is none (Rotary::none), which in Python is None.
template <class Value>
std::string_view word_of(Value value) {
  for (const ValueWord<Value>& word : kWords<Value>) {
    if (word.value == value) return word.text;
  }
  return {};
}

template <class Value>
std::optional<Value> value_of(std::string_view text) {
  for (const ValueWord<Value>& word : kWords<Value>) {
    if (word.text == text) return word.value;
  }
  return std::nullopt;
}

/// "one of mean, rms"
template <class Value>
std::string known_words() {
  std::string all;
  for (const ValueWord<Value>& word : kWords<Value>) all.append(all.empty() ? "one of " : ", ").append(word.text);
  return all;
}

}  // namespace tessera::python
