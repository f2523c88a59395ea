// SPDX-License-Identifier: Apache-2.0
// save() and load() of skip states: the lines of header(), the next step, then the arrays.
#include <bit>
#include <cstring>
#include <sstream>
#include <utility>

#include "api/device_bytes.h"
#include "base/checked.h"
#include "tessera/error.h"
#include "tessera/skip_state.h"

namespace tessera {
namespace {

[[noreturn]] void refuse(std::string argument, std::string got, std::string want) {
  throw Error(ErrorCode::invalid_argument, std::move(argument), std::move(got), std::move(want));
}

/// Throws if a list in the form of save(), rows of words, has bits beyond the last key block of a row.
void check_stored_list(const Problem& problem, std::span<const std::byte> list) {
  const std::int64_t in_last = problem.key_blocks() % 32;
  if (in_last == 0) return;
  const auto row = static_cast<std::size_t>(detail::ceil_div(problem.key_blocks(), 32)) * sizeof(std::uint32_t);
  for (std::size_t end = row; end <= list.size(); end += row) {
    std::uint32_t last;
    std::memcpy(&last, list.data() + end - sizeof last, sizeof last);
    if (last >> in_last == 0) continue;
    const std::int64_t block = problem.key_blocks() / 32 * 32 + 31 - std::countl_zero(last);
    refuse("saved", "a list with key block " + std::to_string(block),
           "key blocks below " + std::to_string(problem.key_blocks()));
  }
}

}  // namespace

std::vector<std::byte> SkipState::save() const {
  const std::string lines = header() + std::to_string(next_step_) + "\n";
  std::vector<std::byte> saved(lines.size() + bytes());
  std::byte* to = saved.data() + lines.size();
  std::memcpy(saved.data(), lines.data(), lines.size());
  const std::vector<std::uint32_t> bits = words();
  for (const Part& part : parts()) {
    if (part.bytes == 0) continue;
    if (part.at == 0) {
      std::memcpy(to, bits.data(), part.bytes);
    } else if (gpu_) {
      gpu_->get(part.at, to, part.bytes);
    } else {
      std::memcpy(to, host_.data() + part.at, part.bytes);
    }
    to += part.bytes;
  }
  return saved;
}

void SkipState::load(std::span<const std::byte> saved) {
  const std::string_view text(reinterpret_cast<const char*>(saved.data()), saved.size());
  std::size_t at = 0;
  const auto line = [&](const char* what) {
    const std::size_t end = text.find('\n', at);
    if (end == std::string_view::npos) refuse("saved", "an end before " + std::string(what), "what save() gave");
    std::string found(text.substr(at, end - at));
    at = end + 1;
    return found;
  };
  std::istringstream wanted(header());
  for (const char* what : {"saved", "problem", "layer"}) {
    std::string want;
    std::getline(wanted, want);
    if (const std::string found = line(what); found != want) refuse(what, found.substr(0, 300), want);
  }
  const std::string step = line("step");
  const bool number = !step.empty() && step.size() < 10 && step.find_first_not_of("0123456789") == std::string::npos;
  const std::int64_t next = number ? std::stoll(step) : -1;
  if (next < 0 || next > options_.steps) refuse("step", step, "0 to " + std::to_string(options_.steps));
  if (saved.size() - at != bytes()) {
    refuse("saved", std::to_string(saved.size() - at) + " bytes of arrays", std::to_string(bytes()));
  }
  check_stored_list(problem_, saved.subspan(at, parts().front().bytes));
  for (const Part& part : parts()) {
    if (gpu_) {
      gpu_->put(part.at, saved.data() + at, part.bytes);
    } else if (part.bytes > 0) {
      std::memcpy(host_.data() + part.at, saved.data() + at, part.bytes);
    }
    at += part.bytes;
  }
  next_step_ = next;
}

}  // namespace tessera
