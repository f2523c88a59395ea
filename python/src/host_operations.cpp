// SPDX-License-Identifier: Apache-2.0
#include "host_operations.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "arrays/array.h"
#include "arrays/parts.h"
#include "cpu/scores/philox.h"
#include "tessera/error.h"
#include "tessera/executor.h"

namespace nb = nanobind;

namespace tessera::python {
namespace {

std::int64_t longest_step(nb::handle boundaries, const std::string& name) {
  const ArrayView view(boundaries.ptr(), name, ArrayView::Use::read);
  const Tensor& tensor = view.tensor();
  if (tensor.dtype != DType::int32 || tensor.rank != 1 || tensor.device.type != DeviceType::cpu ||
      (tensor.shape[0] > 1 && tensor.strides[0] != 1)) {
    throw Error(ErrorCode::invalid_argument, name, tensor.describe(), "int32 (batch + 1) on cpu, contiguous");
  }
  if (tensor.shape[0] > 0 && tensor.data == nullptr) {
    throw Error(ErrorCode::invalid_argument, name, "nullptr", "memory for " + tensor.describe());
  }
  const auto* values = tensor.as<const std::int32_t>();
  std::int64_t longest = 0;
  for (std::int64_t i = 1; i < tensor.shape[0]; ++i) {
    longest = std::max(longest, static_cast<std::int64_t>(values[i]) - values[i - 1]);
  }
  return longest;
}

/// Section 7 of docs/semantics.md, 16 keys of a row at a time.
struct Dropout {
  std::uint32_t threshold;
  std::uint64_t seed;
  std::uint64_t offset;

  /// Which of 16 keys of a row are kept, from 16 · group on.
  [[nodiscard]] std::array<bool, 16> keeps(std::uint32_t plane, std::uint32_t row, std::uint32_t group) const noexcept {
    const std::uint64_t philox_key = seed ^ (offset >> 32 << 32);
    std::array<bool, 16> kept;
    for (std::uint32_t pair = 0; pair < 4; ++pair) {  // of keys, in each half of the 16
      const cpu::PhiloxCounter draws =
          cpu::philox4x32({group * 4 + pair, row / 16 * 8 + row % 8, plane, static_cast<std::uint32_t>(offset)},
                          {static_cast<std::uint32_t>(philox_key), static_cast<std::uint32_t>(philox_key >> 32)});
      for (std::uint32_t half = 0; half < 2; ++half) {
        const std::uint32_t of_both = draws[half * 2 + row % 16 / 8];
        kept[half * 8 + pair * 2] = (of_both & 0xFFFFU) < threshold;
        kept[half * 8 + pair * 2 + 1] = of_both >> 16 < threshold;
      }
    }
    return kept;
  }
};

void dropout_keep(nb::handle out, double dropout, std::uint64_t seed, std::uint64_t offset, std::int64_t batch,
                  std::int64_t head, std::optional<std::int64_t> heads, std::optional<std::int64_t> q_offset,
                  std::int64_t k_offset) {
  const ArrayView view(out.ptr(), "out", ArrayView::Use::write);
  const Tensor& t = view.tensor();
  const auto rank = static_cast<std::size_t>(std::max(t.rank, 0));
  if (t.dtype != DType::uint8 || (rank != 3 && rank != 4) || !t.is_contiguous() || t.device.type != DeviceType::cpu) {
    throw Error(ErrorCode::invalid_argument, "out", t.describe(),
                "contiguous bool or uint8 (batch, heads, seqlen_q, seqlen_k), or without batch, on cpu");
  }
  if (!(dropout >= 0.0 && dropout < 1.0)) {
    throw Error(ErrorCode::invalid_argument, "dropout", std::to_string(dropout), "0 to below 1");
  }
  const std::int64_t batches = rank == 4 ? t.shape[0] : 1;
  const std::int64_t planes = t.shape[rank - 3], rows = t.shape[rank - 2], keys = t.shape[rank - 1];
  const std::int64_t all_heads = heads.value_or(planes), row_offset = q_offset.value_or(keys - rows);
  // As the problem's fp32 probability gives it.
  const auto kept =
      static_cast<std::uint32_t>(std::lround((1.0 - static_cast<double>(static_cast<float>(dropout))) * 65536.0));
  const Dropout drops{kept, seed, offset};
  auto* bytes = t.as<std::uint8_t>();
  const nb::gil_scoped_release released;
  for (std::int64_t b = 0; b < batches; ++b) {
    for (std::int64_t h = 0; h < planes; ++h) {
      const auto plane = static_cast<std::uint32_t>((batch + b) * all_heads + head + h);
      for (std::int64_t i = 0; i < rows; ++i) {
        const auto row = static_cast<std::uint32_t>(i + row_offset);
        std::array<bool, 16> of_keys{};
        for (std::int64_t j = 0; j < keys; ++j) {
          const auto key = static_cast<std::uint32_t>(j + k_offset);
          if (j == 0 || key % 16 == 0) of_keys = drops.keeps(plane, row, key / 16);
          *bytes++ = of_keys[key % 16];
        }
      }
    }
  }
}

std::atomic<int> set_number{0};  // of threads; 0: none was set

int default_threads() noexcept {
#ifdef _OPENMP
  return std::max(omp_get_max_threads(), 1);
#else
  return 1;
#endif
}

template <class Find>
std::vector<std::string> known_names(std::initializer_list<const char*> names, Find find) {
  std::vector<std::string> known;
  for (const char* name : names) {
    if (find(name)) known.emplace_back(name);
  }
  return known;
}

}  // namespace

int threads_of_calls() noexcept {
  const int number = set_number;
  return number > 0 ? number : default_threads();
}

void define_host_operations(nb::module_& m) {
  m.def(
      "set_threads", [](int threads) { set_number = threads; }, nb::arg("threads"),
      "Worker threads of calls that do not say; 0: as many as OpenMP would use.");
  m.def("get_threads", &threads_of_calls, "That number, or what OpenMP would use.");
  m.def("default_threads", &default_threads, "Threads that OpenMP would use for the calling thread's work.");
  m.def("longest_step", &longest_step, nb::arg("boundaries"), nb::arg("name") = "boundaries",
        "The largest difference of neighbours in int32 (n), 0 for fewer than two entries; `name` is for errors.");
  m.def("dropout_keep", &dropout_keep, nb::arg("out"), nb::arg("dropout"), nb::arg("seed"), nb::arg("offset") = 0,
        nb::arg("batch") = 0, nb::arg("head") = 0, nb::arg("heads") = nb::none(), nb::arg("q_offset") = nb::none(),
        nb::arg("k_offset") = 0,
        "Writes which probabilities dropout keeps into out, bool (batch, heads, seqlen_q, seqlen_k) or without batch.\n"
        "batch, head: positions of the first; heads: of the whole problem (default: out's); q_offset: default\n"
        "seqlen_k − seqlen_q.");
  m.def(
      "violation_of",
      [](std::int32_t status) -> std::optional<std::pair<std::string, std::int64_t>> {
        const std::optional<Violation> found = tessera::violation_of(status);
        if (!found) return std::nullopt;
        return std::pair{std::string(to_string(found->slot)), found->sequence};
      },
      nb::arg("status"), "(slot, sequence) of a status word, None for 0.");
  m.def(
      "builtin_scores",
      [] {
        return known_names({"relative", "soft_clip"}, builtin_score);
      },
      "Names that score= knows.");
  m.def(
      "builtin_masks",
      [] {
        return known_names({"document", "checkerboard", "prefix"}, builtin_mask);
      },
      "Names that mask= knows.");
  m.def(
      "parts_fit",
      [](const nb::tuple& parts, const std::string& name, int device, std::uintptr_t stream) {
        const Place place = device < 0 ? Place{} : Place{{DeviceType::cuda, device}, {reinterpret_cast<void*>(stream)}};
        const PartViews views(parts.ptr(), name, place);
        return views.evenly_spaced();
      },
      nb::arg("parts"), nb::arg("name") = "parts", nb::arg("device") = -1, nb::arg("stream") = 0,
      "Whether arrays are the parts of one strided tensor: same shape, dtype and strides, at even distances.\n"
      "device: where they are, −1 for the CPU; stream: where they will be used.");
}

}  // namespace tessera::python
