// SPDX-License-Identifier: Apache-2.0
// The target and the wishes of a plan, with their text forms.
#include <algorithm>

#include "base/checked.h"
#include "plan/backend.h"
#include "problem/line_reader.h"
#include "tessera/error.h"
#include "tessera/plan.h"

namespace tessera {

Target Target::cpu(int threads, std::string isa) {
  Target target;
  target.threads = threads;
  target.isa = std::move(isa);
  return target;
}

Target Target::cuda(int sm) {
  Target target;
  target.device = DeviceType::cuda;
  target.sm = sm;
  // Opt-in shared memory of a block by compute capability (CUDA C++ Programming Guide, table of technical
  // specifications): 163 KB on 8.0 and 8.7, 99 KB on the other 8.x and on 12.x, 227 KB on 9.0 and 10.x.
  const bool small = (sm >= 81 && sm <= 89 && sm != 87) || (sm >= 120 && sm < 130);
  const bool ampere = sm == 80 || sm == 87;
  target.shared_memory = (small ? 99 : ampere ? 163 : 227) * std::int64_t{1024};
  return target;
}

Target Target::cuda_device(int index) { return detail::backend(DeviceType::cuda).device(index); }

Target Target::emulate(int sm, int index) {
  const Target present = cuda_device(index);
  Target target = cuda(sm);
  // Only 9.0 has wgmma. Plans for newer chips use the tensor memory accelerator, which chips have from 9.0 on.
  const bool same_instructions = sm == 90 ? present.sm == 90 : sm < 90 || present.sm >= 90;
  if (target.shared_memory > present.shared_memory || !same_instructions) {
    throw Error(ErrorCode::unsupported, "emulate", "sm_" + std::to_string(sm) + " on " + present.to_string(),
                "a chip whose instructions and shared memory the present one has");
  }
  target.multiprocessors = present.multiprocessors;
  target.index = present.index;
  target.emulated = sm != present.sm;
  return target;
}

std::vector<std::string> cpu_isas() { return detail::backend(DeviceType::cpu).isas(); }

std::string Target::to_string() const {
  if (device == DeviceType::cpu) {
    std::string text = "cpu threads=" + (threads > 0 ? std::to_string(threads) : std::string("auto"));
    return text + " isa=" + (isa.empty() ? "best" : isa);
  }
  std::string text = "cuda sm=" + std::to_string(sm) + " shared_memory=" + std::to_string(shared_memory);
  if (multiprocessors > 0) text += " multiprocessors=" + std::to_string(multiprocessors);
  if (index != 0) text += " device=" + std::to_string(index);
  return emulated ? text + " emulated" : text;
}

Wishes Wishes::parse(std::string_view text) {
  const detail::LineReader line(text, false);
  const auto positive = [&line](std::string_view key) {
    const auto value = line.integer(key);
    if (value && (*value < 1 || *value > detail::kMaxSize)) {
      line.reject(key, std::to_string(*value), "an integer of 1 or more");
    }
    return value;
  };
  Wishes wishes;
  wishes.implementation = line.value("implementation").value_or("");
  wishes.tile_q = positive("tile_q");
  wishes.tile_kv = positive("tile_kv");
  wishes.splits = positive("splits");
  wishes.stages = positive("stages");
  wishes.warps = positive("warps");
  wishes.loader = line.value("loader").value_or("");
  line.check_all_used();
  return wishes;
}

std::string Wishes::to_string() const {
  std::string text;
  const auto add = [&text](std::string_view key, const std::string& value) {
    if (!text.empty()) text += ' ';
    text.append(key).append("=").append(value);
  };
  if (!implementation.empty()) add("implementation", implementation);
  if (tile_q) add("tile_q", std::to_string(*tile_q));
  if (tile_kv) add("tile_kv", std::to_string(*tile_kv));
  if (splits) add("splits", std::to_string(*splits));
  if (stages) add("stages", std::to_string(*stages));
  if (warps) add("warps", std::to_string(*warps));
  if (!loader.empty()) add("loader", loader);
  return text;
}

}  // namespace tessera
