// SPDX-License-Identifier: Apache-2.0
// The list of kernels that ship: its lines, its budget, and the spread of it that is compiled where not all are.
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "cases/line/case.h"
#include "command/spread.h"
#include "cuda/jit/compile.h"
#include "plan/implementations.h"
#include "tessera/plan.h"

namespace tessera {
namespace {

struct Kernel {
  cuda::KernelSource source;
  std::string architecture;
};

struct KernelList {
  std::vector<Kernel> kernels;        // each once
  std::map<std::string, int> budget;  // of families, in kernels
  std::set<std::string> lines;
};

std::string family_of(const std::string& name) { return name.substr(0, name.find(' ')); }

/// The plan of a line must fit the shared memory of every architecture that it is for.
void add_line(KernelList& list, std::set<std::string>& seen, const std::string& line) {
  EXPECT_TRUE(list.lines.insert(line).second) << "twice: " << line;
  const std::size_t only = line.find(" arch=");
  const std::string only_on = only == std::string::npos ? "" : line.substr(only);
  const cases::Case one = cases::Case::parse(line.substr(0, only));
  for (const int sm : {80, 89, 90, 100, 120}) {
    const std::string architecture = cuda::architecture(sm);
    if (!only_on.empty() && only_on.find(architecture) == std::string::npos) continue;
    const Target target = Target::cuda(sm);
    const Plan plan = make_plan(one.problem, target, one.wishes);
    ASSERT_FALSE(plan.state().kernels.empty()) << line;
    for (const cuda::KernelSource& source : plan.state().kernels) {
      EXPECT_LE(static_cast<std::int64_t>(source.shared_bytes), target.shared_memory) << line;
      if (seen.insert(architecture + source.text).second) list.kernels.push_back({source, architecture});
    }
  }
}

/// Budgets are comments: "#   fwd_mma 560: forwards by mma.sync".
void add_budget(KernelList& list, const std::string& comment) {
  std::istringstream words(comment);
  std::string mark, family;
  int most = 0;
  if (words >> mark >> family >> most && words.get() == ':') list.budget[family] = most;
}

const KernelList& kernel_list() {
  static const KernelList held = [] {
    KernelList list;
    std::set<std::string> seen;
    std::ifstream file(std::string(TESSERA_SOURCE_DIR) + "/src/cuda/aot/kernels.list");
    for (std::string line; std::getline(file, line);) {
      if (line.starts_with('#')) add_budget(list, line);
      if (!line.empty() && !line.starts_with('#')) add_line(list, seen, line);
    }
    return list;
  }();
  return held;
}

TEST(KernelList, EveryLineIsAPlanWithKernelsOnItsTargets) { EXPECT_GE(kernel_list().lines.size(), 200U); }

TEST(KernelList, EveryFamilyKeepsToItsBudget) {
  std::map<std::string, int> counts;
  for (const Kernel& kernel : kernel_list().kernels) ++counts[family_of(kernel.source.name)];
  for (const auto& [family, count] : counts) {
    ASSERT_TRUE(kernel_list().budget.contains(family)) << family << " has no budget";
    EXPECT_LE(count, kernel_list().budget.at(family)) << family;
  }
  for (const auto& [family, most] : kernel_list().budget) EXPECT_TRUE(counts.contains(family)) << family;
}

std::vector<Kernel> spread() {
  std::vector<cli::ListedKernel> listed;
  for (const Kernel& kernel : kernel_list().kernels) listed.push_back({kernel.source.name, kernel.architecture});
  std::vector<Kernel> taken;
  for (const std::size_t i : cli::spread_of(listed)) taken.push_back(kernel_list().kernels[i]);
  return taken;
}

/// Fields of the line "constexpr TYPE config{.name = value, …};" of a kernel's source.
std::map<std::string, std::string> fields_of(const std::string& source) {
  std::map<std::string, std::string> fields;
  const std::size_t begin = source.find(" config{");
  if (begin == std::string::npos) return fields;
  const std::size_t from = begin + std::string(" config{").size();
  std::istringstream text(source.substr(from, source.find("};", from) - from));
  for (std::string name, is, value; text >> name >> is >> value;) {
    fields[name] = value.substr(0, value.find(','));
  }
  return fields;
}

/// "ARCHITECTURE FAMILY .field = value" of all of them, a value being "default" where a text leaves the field out.
std::set<std::string> values_of(const std::vector<Kernel>& kernels,
                                const std::map<std::string, std::set<std::string>>& fields) {
  std::set<std::string> values;
  for (const Kernel& kernel : kernels) {
    const std::string family = family_of(kernel.source.name);
    const auto given = fields_of(kernel.source.text);
    for (const std::string& field : fields.at(family)) {
      values.insert(kernel.architecture + " " + family + " " + field + " = " +
                    (given.contains(field) ? given.at(field) : "default"));
    }
  }
  return values;
}

TEST(Spread, TakesTheFewestItFindsThatHaveEveryWord) {
  const std::vector<cli::ListedKernel> kernels = {{"fwd a", "sm_80"}, {"fwd a b", "sm_80"}, {"fwd c", "sm_80"},
                                                  {"fwd b", "sm_80"}, {"bwd b", "sm_80"},   {"fwd b", "sm_90a"}};
  EXPECT_EQ(cli::spread_of(kernels), (std::set<std::size_t>{1, 2, 4, 5}));
  EXPECT_EQ(cli::spread_of({}), std::set<std::size_t>{});
}

TEST(Spread, HasEveryValueOfEveryFieldOnEveryArchitecture) {
  std::map<std::string, std::set<std::string>> fields;  // of families
  for (const Kernel& kernel : kernel_list().kernels) {
    std::set<std::string>& names = fields[family_of(kernel.source.name)];
    for (const auto& [name, _] : fields_of(kernel.source.text)) names.insert(name);
  }
  EXPECT_GE(fields.at("fwd_mma").size(), 20U);
  const std::set<std::string> all = values_of(kernel_list().kernels, fields);
  const std::set<std::string> taken = values_of(spread(), fields);
  EXPECT_GE(all.size(), 400U);
  for (const std::string& value : all) EXPECT_TRUE(taken.contains(value)) << value;
}

TEST(Spread, IsAboutAQuarterAndHasEveryFamily) {
  std::set<std::string> families;
  for (const Kernel& kernel : spread()) families.insert(kernel.architecture + family_of(kernel.source.name));
  for (const Kernel& kernel : kernel_list().kernels) {
    EXPECT_TRUE(families.contains(kernel.architecture + family_of(kernel.source.name))) << kernel.source.name;
  }
  EXPECT_LE(spread().size() * 3, kernel_list().kernels.size()) << spread().size();
}

}  // namespace
}  // namespace tessera
