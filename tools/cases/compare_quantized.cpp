// SPDX-License-Identifier: Apache-2.0
#include "cases/compare_quantized.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cpu/reference/number.h"

namespace tessera::cases {

std::string compare_quantized(const Bindings& got, const reference::Result& oracle, double allowed) {
  const Tensor& tensor = got[Slot::x_quantized];
  const reference::Output& output = oracle[Slot::x_quantized];
  const double largest = tensor.dtype == DType::int8 ? 127 : reference::format_of(tensor.dtype).largest;
  const auto nearest = [&](double value) {
    return reference::nearest_quantised(tensor.dtype, std::min(std::max(value, -largest), largest));
  };
  std::string failure;
  reference::for_each_element(tensor, [&](std::int64_t index, std::int64_t offset) {
    const auto at = static_cast<std::size_t>(index);
    if (output.written[at] == 0 || !failure.empty()) return;
    const double value = reference::read(tensor, offset);
    const double want = output.values[at];
    const bool good =
        std::isnan(want) ? std::isnan(value) : value >= nearest(want - allowed) && value <= nearest(want + allowed);
    if (good) return;
    failure = fmt::format("x_quantized: element {}: got {}, oracle {:.9g} before its rounding, within {:.3g}", index,
                          value, want, allowed);
  });
  return failure;
}

}  // namespace tessera::cases
