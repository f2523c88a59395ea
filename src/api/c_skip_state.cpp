// SPDX-License-Identifier: Apache-2.0
// Skip states in the C ABI.
#include <cstring>
#include <span>
#include <vector>

#include "api/c_values.h"
#include "tessera/skip_state.h"

struct tessera_skip_state {
  tessera::SkipState state;
};

namespace {

using namespace tessera::c_abi;

tessera::SkipOptions options_of(const tessera_skip_options* given) {
  const tessera_skip_options from = sized(given, "options");
  tessera::SkipOptions options;
  options.steps = from.steps;
  options.warm_up = from.warm_up;
  options.ramp = {from.first, from.last};
  if (from.head_count > 0) (void)required(from.heads, "options.heads");
  for (std::size_t i = 0; i < from.head_count; ++i) {
    options.heads.push_back({from.heads[i].head, {from.heads[i].first, from.heads[i].last}});
  }
  options.layer = from.layer != nullptr ? from.layer : "";
  return options;
}

std::vector<tessera::TokenRange> ranges_of(const tessera_token_range* given, std::size_t count, const char* argument) {
  std::vector<tessera::TokenRange> ranges;
  if (count > 0) (void)required(given, argument);
  for (std::size_t i = 0; i < count; ++i) ranges.push_back({given[i].begin, given[i].end});
  return ranges;
}

}  // namespace

int tessera_skip_state_create(const tessera_problem* problem, const tessera_skip_options* options,
                              tessera_skip_state** state) {
  return guarded([&] {
    required(state, "state") = nullptr;
    *state = new tessera_skip_state{tessera::SkipState(required(problem, "problem").problem, options_of(options))};
  });
}

int tessera_skip_state_create_on(const tessera_problem* problem, const tessera_skip_options* options, int device_index,
                                 tessera_skip_state** state) {
  return guarded([&] {
    required(state, "state") = nullptr;
    *state = new tessera_skip_state{tessera::SkipState(required(problem, "problem").problem, options_of(options),
                                                       {tessera::DeviceType::cuda, device_index})};
  });
}

int tessera_skip_state_reset(tessera_skip_state* state) {
  return guarded([&] { required(state, "state").state.reset(); });
}

int tessera_skip_state_reshape(tessera_skip_state* state, const tessera_problem* problem) {
  return guarded([&] { required(state, "state").state.reshape(required(problem, "problem").problem); });
}

int tessera_skip_state_set_ranges(tessera_skip_state* state, const tessera_token_range* must_do, size_t must_do_count,
                                  const tessera_token_range* must_skip, size_t must_skip_count) {
  return guarded([&] {
    required(state, "state")
        .state.set_ranges(ranges_of(must_do, must_do_count, "must_do"),
                          ranges_of(must_skip, must_skip_count, "must_skip"));
  });
}

int tessera_skip_state_bind(tessera_skip_state* state, int64_t step, tessera_bindings* bindings) {
  return guarded([&] { required(state, "state").state.bind(step, required(bindings, "bindings").bindings); });
}

int tessera_skip_state_bind_on(tessera_skip_state* state, int64_t step, tessera_bindings* bindings, void* stream) {
  return guarded([&] { required(state, "state").state.bind(step, required(bindings, "bindings").bindings, {stream}); });
}

int tessera_skip_state_active(const tessera_skip_state* state, double* share) {
  return guarded([&] { required(share, "share") = required(state, "state").state.active(); });
}

int tessera_skip_state_bytes(const tessera_skip_state* state, size_t* bytes) {
  return guarded([&] { required(bytes, "bytes") = required(state, "state").state.bytes(); });
}

int tessera_skip_state_describe(const tessera_skip_state* state, char* buffer, size_t size, size_t* needed) {
  return guarded([&] { write_text(required(state, "state").state.describe(), buffer, size, needed); });
}

int tessera_skip_state_save(const tessera_skip_state* state, void* buffer, size_t size, size_t* needed) {
  return guarded([&] {
    const std::vector<std::byte> saved = required(state, "state").state.save();
    if (needed != nullptr) *needed = saved.size();
    if (buffer != nullptr && size >= saved.size()) std::memcpy(buffer, saved.data(), saved.size());
  });
}

int tessera_skip_state_load(tessera_skip_state* state, const void* saved, size_t bytes) {
  return guarded([&] {
    if (bytes > 0 && saved == nullptr)
      throw tessera::Error(tessera::ErrorCode::invalid_argument, "saved", "NULL", "a pointer");
    required(state, "state").state.load({static_cast<const std::byte*>(saved), bytes});
  });
}

void tessera_skip_state_destroy(tessera_skip_state* state) { delete state; }
