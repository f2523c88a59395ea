// SPDX-License-Identifier: Apache-2.0
// A table row: a good call, one thing broken, and the error that must come before anything is written.
#pragma once

#include <gtest/gtest.h>

#include <ostream>

#include "call.h"
#include "expect_error.h"

namespace tessera {

struct BadCall {
  const char* name;
  const char* line;
  void (*change)(Call&);
  ErrorCode code;
  const char* argument;
};

inline void PrintTo(const BadCall& bad, std::ostream* out) { *out << bad.name << ": " << bad.line; }

inline void expect_refused(const BadCall& bad) {
  Call call(bad.line);
  ASSERT_NO_THROW(call.run()) << "the call has to be good before it is broken";
  bad.change(call);
  const auto before = call.snapshot();
  expect_error([&] { call.run(); }, bad.code, bad.argument);
  EXPECT_TRUE(call.snapshot() == before) << "something was written";
}

inline std::string bad_call_name(const testing::TestParamInfo<BadCall>& info) { return info.param.name; }

}  // namespace tessera
