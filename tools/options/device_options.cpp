// SPDX-License-Identifier: Apache-2.0
#include "options/device_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <charconv>

#include "cuda/jit/compile.h"
#include "tessera/error.h"

namespace tessera::cli {

std::optional<int> parse_device(const std::string& device) {
  if (device == "cpu") return std::nullopt;
  if (device == "cuda") return 0;
  int index = 0;
  if (device.starts_with("cuda:")) {
    const char* end = device.data() + device.size();
    const auto [rest, error] = std::from_chars(device.data() + 5, end, index);
    if (error == std::errc() && rest == end && index >= 0) return index;
  }
  throw Error(ErrorCode::invalid_argument, "--device", device, "cpu, cuda or cuda:N");
}

int parse_capability(const std::string& text) {
  const std::size_t digits = text.find_first_of("0123456789");
  const std::string number = digits == std::string::npos ? "" : text.substr(digits);
  return cuda::compute_capability("sm_" + number);
}

std::optional<Target> PlaceOptions::target() const {
  const auto index = parse_device(device);
  if (index) return emulate.empty() ? Target::cuda_device(*index) : Target::emulate(parse_capability(emulate), *index);
  if (!emulate.empty()) throw Error(ErrorCode::invalid_argument, "--emulate", emulate, "--device cuda with it");
  return std::nullopt;
}

void add_place_options(CLI::App& verb, PlaceOptions& options) {
  verb.add_option("--device", options.device, "Which device: cpu, cuda or cuda:N")->capture_default_str();
  verb.add_option("--emulate", options.emulate, "On a GPU: the plans of another chip (sm80, sm89, sm120)");
}

std::optional<cases::Gpu> DeviceOptions::gpu() const {
  const std::optional<Target> place = target();
  if (!place) return std::nullopt;
  cases::Gpu gpu;
  gpu.target = *place;
  gpu.placement = apart ? cases::Placement::apart : cases::Placement::together;
  gpu.wishes = fmt::format("{}", fmt::join(wishes, " "));
  Wishes::parse(gpu.wishes);  // checks
  return gpu;
}

void add_device_options(CLI::App& verb, DeviceOptions& options) {
  add_place_options(verb, options);
  verb.add_option("-w,--wish", options.wishes, "On a GPU: wishes for every plan")->allow_extra_args(false);
  verb.add_flag("--apart", options.apart, "On a GPU: an allocation for each tensor, for compute-sanitizer");
}

}  // namespace tessera::cli
