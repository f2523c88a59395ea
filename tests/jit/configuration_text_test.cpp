// SPDX-License-Identifier: Apache-2.0
// Every field of a configuration is in its kernel's source and name.
#include "cuda/source/configuration_text.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>

#include "cuda/attention/config_words.h"
#include "cuda/attention/forward/kernel_source.h"
#include "cuda/jit/headers.h"
#include "shared/append.h"
#include "shared/combine.h"
#include "shared/config.h"
#include "shared/linear.h"
#include "shared/linear_chunk.h"
#include "shared/quantize.h"

namespace tessera::cuda {
namespace {

template <class Config>
class ConfigurationText : public ::testing::Test {};
using Configurations = ::testing::Types<FwdConfig, CombineConfig, AppendConfig, QuantizeConfig, LinearConfig,
                                        LinearSumConfig, ChunkConfig>;
TYPED_TEST_SUITE(ConfigurationText, Configurations);

void change(int& value) { ++value; }
void change(bool& value) { value = !value; }
template <class Enum>
void change(Enum& value) {
  value = static_cast<Enum>(value == Enum{} ? 1 : 0);
}

/// The embedded text of the struct, from its name to the list of its fields.
std::string declaration(const std::string& type) {
  const std::string begin = "struct " + type + " {\n";
  for (const Header& header : embedded_headers()) {
    const std::string text = header.text;
    const std::size_t at = text.find(begin);
    if (at != std::string::npos) return text.substr(at, text.find("visit_fields", at) - at);
  }
  return "";
}

// A changed field is in text and name, and makes the configuration another one.
TYPED_TEST(ConfigurationText, HasEveryFieldThatIsNotAsItIsByDefault) {
  const TypeParam defaults{};
  const std::string type = TypeParam::type_name();
  EXPECT_EQ(configuration_line(defaults), "constexpr " + type + " config{};\n");
  std::set<std::string> texts, names;
  for (int field = 0; field < count_listed<TypeParam>(); ++field) {
    TypeParam config{};
    int i = 0;
    std::string name;
    TypeParam::visit_fields(config, [&](const char* its, auto& value) {
      if (i++ != field) return;
      change(value);
      name = its;
    });
    EXPECT_FALSE(config == defaults) << name;
    EXPECT_TRUE(texts.insert(configuration_line(config)).second) << name;
    EXPECT_NE(configuration_line(config).find("{." + name + " = "), std::string::npos) << configuration_line(config);
    EXPECT_TRUE(names.insert(words_of(config, Words::beyond_defaults)).second) << name;
    EXPECT_EQ(words_of(config, Words::beyond_defaults).find(" " + name), 0U) << name;
    EXPECT_EQ(words_of(config, Words::beyond_defaults, {name}), "");
  }
}

// The list names each member by its own name, in the order of the struct: C++ wants initialisers in it.
TYPED_TEST(ConfigurationText, ListsTheMembersUnderTheirNames) {
  const std::string text = declaration(TypeParam::type_name());
  ASSERT_FALSE(text.empty());
  const TypeParam config{};
  const void* before = nullptr;
  std::size_t at = 0;
  TypeParam::visit_fields(config, [&](const char* name, const auto& value) {
    EXPECT_LT(before, static_cast<const void*>(&value)) << name;
    before = &value;
    const std::size_t next = text.find(" " + std::string(name) + " = ", at);
    ASSERT_NE(next, std::string::npos) << name << " in the order of the list:\n" << text;
    // What lies between two fields declares no other.
    EXPECT_LE(std::count(text.begin() + static_cast<std::ptrdiff_t>(at),
                         text.begin() + static_cast<std::ptrdiff_t>(next), '='),
              1)
        << name;
    at = next;
  });
}

TEST(ConfigurationWords, OfAForwardNameWhatItsShapeDoesNotTell) {
  FwdConfig config;
  EXPECT_EQ(words_of(config), " bf16 d=128:128 tile=128x64 stages=1");
  config.output = Element::fp32;
  config.d = 256;
  config.dv_parts = 2;
  config.ping_pong = false;
  config.source = Source::paged;
  config.softcap = Softcap::rational;
  config.dropout = true;
  EXPECT_EQ(words_of(config),
            " bf16 output=fp32 d=256:2x128 tile=128x64 stages=1 ping_pong=no source=paged softcap=rational dropout");
}

// Whatever field is added, two forwards of different texts have different names.
TEST(ConfigurationWords, ForwardsThatDifferHaveNamesThatDiffer) {
  std::set<std::string> texts, names;
  for (int field = 0; field < count_listed<FwdConfig>(); ++field) {
    FwdConfig config;
    CallableSources callables;
    int i = 0;
    FwdConfig::visit_fields(config, [&](const char* /*name*/, auto& value) {
      if (i++ == field) change(value);
    });
    if (config.user_score) callables.score.word = " score=some";
    if (config.user_mask) callables.mask.word = " mask=some";
    const KernelSource source = fwd_source(config, callables);
    EXPECT_TRUE(texts.insert(source.text).second) << source.text;
    EXPECT_TRUE(names.insert(source.name).second) << source.name;
  }
}

// What is counted: members of the aggregate, and those that its list has.
struct Forgetful {
  int first = 1;
  bool second = false;
  Element third = Element::bf16;
  static constexpr const char* type_name() { return "Forgetful"; }
  template <class Config, class Visitor>
  static constexpr void visit_fields(Config& c, Visitor&& visit) {
    visit("first", c.first);
    visit("third", c.third);
  }
};
static_assert(count_fields<Forgetful>() == 3);
static_assert(count_listed<Forgetful>() == 2);

}  // namespace
}  // namespace tessera::cuda
