// SPDX-License-Identifier: Apache-2.0
// Which headers a kernel's key holds.
#include "cuda/jit/includes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "cuda/jit/cache_entry.h"
#include "plan/implementations.h"
#include "tessera/plan.h"

namespace tessera::cuda {
namespace {

using Names = std::vector<std::string_view>;

TEST(Includes, OfATextAreItsQuotedNames) {
  EXPECT_EQ(included_names("#include \"a.h\"\n  #  include \t\"b/c.cuh\"  // why\nint x;\n#include \"last.h\""),
            (Names{"a.h", "b/c.cuh", "last.h"}));
  EXPECT_EQ(included_names("#include <a.h>\n#define include \"b.h\"\ninclude \"c.h\"\n#includes\n#include\n#\n\n"),
            Names{});
  EXPECT_EQ(included_names(""), Names{});
}

TEST(Includes, FollowHeadersThroughCirclesToTheEnd) {
  const Header headers[] = {{"a", "#include \"b\"\n"},
                            {"b", "#pragma once\n#include \"c\"\n#include \"a\"\n"},
                            {"c", "int c;\n"},
                            {"d", "#include \"c\"\n"}};
  const Includes includes(headers);
  EXPECT_EQ(includes.of("#include \"a\"\n"), (Names{"a", "b", "c"}));
  EXPECT_EQ(includes.of("#include \"d\"\n#include \"d\"\n"), (Names{"c", "d"}));
  EXPECT_EQ(includes.of("#include \"unknown\"\nint x;\n"), Names{});
}

TEST(Includes, ADigestChangesWithTheHeadersOfTheSourceAlone) {
  const auto digest = [](const char* b, const char* c, const char* source) {
    const Header headers[] = {{"a", "#include \"b\"\n"}, {"b", b}, {"c", c}};
    return Includes(headers).digest(source);
  };
  const char* source = "#include \"a\"\n";
  const Digest before = digest("int b;", "int c;", source);
  EXPECT_EQ(before, digest("int b;", "long c;", source));
  EXPECT_NE(before, digest("long b;", "int c;", source));
  EXPECT_NE(before, digest("int b;", "int c;", "#include \"b\"\n"));
}

TEST(Includes, EveryHeaderIncludesHeadersThatAreEmbedded) {
  for (const Header& header : embedded_headers()) {
    EXPECT_EQ(std::string_view(header.text).find("#include <"), std::string_view::npos) << header.name;
    for (const std::string_view name : included_names(header.text)) {
      EXPECT_TRUE(std::ranges::any_of(embedded_headers(), [&](const Header& one) { return one.name == name; }))
          << header.name << " includes " << name;
    }
  }
}

/// Embedded headers, one of them another: the digest of a problem's first kernel.
Digest digest_with_change(const std::string& problem, std::string_view changed) {
  std::vector<Header> headers(embedded_headers().begin(), embedded_headers().end());
  const auto at = std::ranges::find_if(headers, [&](const Header& header) { return header.name == changed; });
  EXPECT_TRUE(changed.empty() || at != headers.end()) << changed;
  const std::string text = (at == headers.end() ? std::string() : at->text) + std::string("// changed\n");
  if (at != headers.end()) at->text = text.c_str();
  const Plan plan = make_plan(Problem::parse(problem), Target::cuda(90));
  return Includes(headers).digest(plan.state().kernels.front().text);
}

TEST(Includes, AChangeOfLinearAttentionLeavesForwardsAsTheyAre) {
  const std::string forward = "attention sq=4096 hq=16 d=128 dtype=bf16 causal";
  const std::string linear = "linear_decode b=64 h=64 d=128 dtype=bf16";
  const auto changes = [](const std::string& problem, std::string_view header) {
    return digest_with_change(problem, header) != digest_with_change(problem, "");
  };
  EXPECT_FALSE(changes(forward, "cuda/linear/linear_decode.cuh"));
  EXPECT_TRUE(changes(linear, "cuda/linear/linear_decode.cuh"));
  EXPECT_TRUE(changes(forward, "cuda/attention/forward/wgmma.cuh"));
  EXPECT_FALSE(changes(forward, "cuda/attention/forward/mma.cuh"));
  EXPECT_FALSE(changes(linear, "cuda/attention/forward/wgmma.cuh"));
  for (const std::string& problem : {forward, linear}) EXPECT_TRUE(changes(problem, "shared/types.h")) << problem;
}

}  // namespace
}  // namespace tessera::cuda
