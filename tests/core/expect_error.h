// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <string_view>

#include "tessera/error.h"

namespace tessera {

/// The call throws an Error of this code about this argument, with all three parts of its text filled.
template <class Call>
void expect_error(Call&& call, ErrorCode code, std::string_view argument) {
  try {
    call();
    ADD_FAILURE() << "nothing thrown; wanted an error about " << argument;
  } catch (const Error& error) {
    EXPECT_EQ(error.argument(), argument) << error.what();
    EXPECT_EQ(to_string(error.code()), to_string(code)) << error.what();
    EXPECT_FALSE(error.got().empty()) << error.what();
    EXPECT_FALSE(error.want().empty()) << error.what();
  }
}

}  // namespace tessera
