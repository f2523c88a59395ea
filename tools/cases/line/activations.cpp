// SPDX-License-Identifier: Apache-2.0
#include "cases/line/activations.h"

#include <fmt/format.h>

#include <algorithm>

#include "files/convert.h"
#include "files/safetensors.h"
#include "tessera/error.h"

namespace tessera::cases {
namespace {

[[noreturn]] void refuse(const std::string& got, const std::string& want) {
  throw Error(ErrorCode::invalid_argument, "inputs", got, want);
}

ActivationRows load(const files::SafetensorsFile& file, const std::string& name, std::int64_t dims, const char* key) {
  const files::Array array = file.load(name);
  const std::vector<std::int64_t>& shape = array.shape();
  if (shape.size() != 3 || array.size_bytes() == 0) {
    refuse(fmt::format("{} of shape {} in {}", name, files::describe_shape(shape), file.path()),
           "(tokens, heads, dim)");
  }
  if (shape[2] != dims) {
    refuse(fmt::format("{} of {} dims in {}", name, shape[2], file.path()),
           fmt::format("{}={} of the line", key, dims));
  }
  return {shape[0], shape[1], shape[2], files::to_floats(array.tensor())};
}

}  // namespace

float ActivationRows::at(std::int64_t token, std::int64_t head, std::int64_t dim) const {
  const std::int64_t row = (token % tokens + tokens) % tokens;
  return elements[static_cast<std::size_t>((row * heads + head % heads) * dims + dim)];
}

std::int64_t ActivationSet::query_head(std::int64_t head, std::int64_t group) const {
  const std::int64_t own_group = q.heads / k.heads;
  return head / group % k.heads * own_group + head % group % own_group;
}

std::vector<ActivationSet> load_activations(std::string_view source, const Problem& problem) {
  const std::size_t end = source.find(kActivationsEnd) + kActivationsEnd.size();
  const std::string_view wanted = source.substr(std::min(end + 1, source.size()));
  const files::SafetensorsFile file(std::string(source.substr(0, end)));
  std::vector<ActivationSet> sets;
  for (const files::SafetensorsEntry& entry : file.header().entries) {
    if (!entry.name.starts_with(wanted) || !entry.name.ends_with('q')) continue;
    const std::string prefix = entry.name.substr(0, entry.name.size() - 1);
    if (!file.contains(prefix + "k") || !file.contains(prefix + "v")) continue;
    ActivationSet set{prefix, load(file, prefix + "q", problem.head_dim_qk, "d"),
                      load(file, prefix + "k", problem.head_dim_qk, "d"),
                      load(file, prefix + "v", problem.head_dim_v, "dv")};
    if (set.k.tokens != set.v.tokens || set.k.heads != set.v.heads || set.q.heads % set.k.heads != 0) {
      refuse(fmt::format("{}q, k and v with {}, {} and {} heads in {}", prefix, set.q.heads, set.k.heads, set.v.heads,
                         file.path()),
             "k and v of as many tokens and heads, and a multiple of these in q");
    }
    sets.push_back(std::move(set));
  }
  if (sets.empty()) {
    const std::string under = wanted.empty() ? "" : fmt::format(" that begin with {}", wanted);
    refuse(fmt::format("no tensors{} for q, k and v in {}", under, file.path()),
           "q, k and v, or with a prefix: layer0.q, layer0.k and layer0.v");
  }
  std::sort(sets.begin(), sets.end(), [](const auto& a, const auto& b) { return a.prefix < b.prefix; });
  return sets;
}

}  // namespace tessera::cases
