// SPDX-License-Identifier: Apache-2.0
// The case files, some random problems, and the judge itself: it must object to what is wrong.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "base/element.h"
#include "cases/compare.h"
#include "cases/inputs/inputs.h"
#include "cases/inputs/poison.h"
#include "cases/random/features.h"
#include "cases/random/problem.h"
#include "cases/trial.h"
#include "cpu/reference/number.h"
#include "cpu/simd/kernels.h"
#include "files/convert.h"
#include "files/safetensors.h"
#include "tessera/error.h"

namespace tessera::cases {
namespace {

TEST(CaseFiles, AllPass) {
  std::size_t run = 0;
  for (const auto& entry : std::filesystem::directory_iterator(TESSERA_SOURCE_DIR "/tests/cases")) {
    if (entry.is_directory()) continue;  // cases too large for here
    for (const Case& one : read_case_file(entry.path().string())) {
      const Outcome outcome = run_case(one);
      EXPECT_TRUE(outcome.passed) << outcome.failure << "\n  tessera verify " << outcome.rerun;
      ++run;
    }
  }
  EXPECT_GT(run, 300U);
}

// Every case in bf16 by the walks over tiles of the dot products, which this machine may lack; an output of a type of
// its own, which a backward's dout has too, keeps it. In parts, which may run at the same time, and of which the
// sanitizers take one.
class Bf16CaseFiles : public testing::TestWithParam<int> {};
constexpr int kCaseParts = 36;

TEST_P(Bf16CaseFiles, PassOnEmulatedDotProducts) {
  std::size_t run = 0;
  int number = 0;
  for (const auto& entry : std::filesystem::directory_iterator(TESSERA_SOURCE_DIR "/tests/cases")) {
    if (entry.is_directory()) continue;  // cases too large for here
    for (Case one : read_case_file(entry.path().string())) {
      if (one.problem.operation != Operation::attention || detail::is_quantised(one.problem.k_type)) continue;
      if (number++ % kCaseParts != GetParam()) continue;
      if (one.problem.o_type == one.problem.q_type) one.problem.o_type = DType::bf16;
      one.problem.q_type = one.problem.k_type = one.problem.v_type = DType::bf16;
      for (const Outcome& outcome : run_case_on(one, cpu::emulated_isas())) {
        EXPECT_TRUE(outcome.passed) << outcome.failure << "\n  tessera verify " << outcome.rerun;
        ++run;
      }
    }
  }
  EXPECT_GT(run, 25U);
}
INSTANTIATE_TEST_SUITE_P(Parts, Bf16CaseFiles, testing::Range(0, kCaseParts));

TEST(CaseLines, LengthsBeyondTheCapacityAreRefused) {
  for (const char* line : {"attention sq=10 sk=30 kv=table page=8 lens_k=50", "attention sq=10 seqused_q lens_q=11",
                           "kv_append sq=4 sk=8 lens_k=5"}) {
    const Outcome outcome = run_case(Case::parse(line));
    EXPECT_FALSE(outcome.passed) << line;
    EXPECT_NE(outcome.failure.find("for sequence 0; want 0 to"), std::string::npos) << outcome.failure;
  }
}

TEST(CaseFiles, ReferenceImplementationPassesToo) {
  for (const char* file : {"segments", "lists", "mass_next", "combine", "kv_append", "linear", "empty", "nsa_pool",
                           "nsa_select", "nsa_gate"}) {
    for (Case one : read_case_file(std::string(TESSERA_SOURCE_DIR "/tests/cases/") + file + ".txt")) {
      one.wishes = Wishes::parse("implementation=cpu.reference");
      const Outcome outcome = run_case(one);
      EXPECT_TRUE(outcome.passed) << outcome.failure << "\n  tessera verify " << outcome.rerun;
    }
  }
}

// In parts for the same reason.
class RandomCaseParts : public testing::TestWithParam<int> {};
constexpr int kRandomParts = 3;

TEST_P(RandomCaseParts, PassOnEveryInstructionSet) {
  const std::vector<std::string> isas = tested_isas();
  for (auto index = static_cast<std::uint64_t>(GetParam()); index < 300; index += kRandomParts) {
    for (const Outcome& outcome : run_case_on(random_case(2024, index, isas), isas)) {
      EXPECT_TRUE(outcome.passed) << outcome.failure << "\n  tessera verify " << outcome.rerun;
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Parts, RandomCaseParts, testing::Range(0, kRandomParts));

TEST(RandomCases, RoundTripAsTextAndNeverMixWhatCannotBe) {
  const std::vector<std::string> isas = tested_isas();
  FeatureHistogram histogram;
  for (std::uint64_t index = 0; index < 3000; ++index) {
    const Case one = random_case(7, index, isas);
    EXPECT_EQ(Case::parse(one.to_string()), one) << one.to_string();
    EXPECT_EQ(random_case(7, index, isas), one);
    histogram.add(features_of(one));
  }
  EXPECT_EQ(histogram.total(), 3000U);
  for (std::size_t a = 0; a < feature_count(); ++a) {
    EXPECT_GT(histogram.count(a, a), 0U) << feature_name(a);
    for (std::size_t b = 0; b < a; ++b) {
      if (why_apart(a, b).empty()) continue;
      EXPECT_EQ(histogram.count(a, b), 0U) << feature_name(a) << " + " << feature_name(b);
    }
  }
}

TEST(CaseText, RejectsWhatItDoesNotKnow) {
  EXPECT_THROW(Case::parse("attention sq=4 colour=red"), Error);
  EXPECT_THROW(Case::parse("attention sq=4 seed=x"), Error);
  EXPECT_THROW(Case::parse("attention sq=4 seed=1 seed=2"), Error);
  EXPECT_THROW(Case::parse("attention sq=4 strides=diagonal"), Error);
  EXPECT_THROW(Case::parse("attention b=2 sq=4 tile_q=0x10"), Error);
  for (const char* kind : {"large", "scale", "scale:", "scale:x", "scale:inf", "rising:2", "sink:", "nan_tail:1",
                           "activations", "activations:a.npy", "activations:a.safetensorss"}) {
    EXPECT_THROW(Case::parse(std::string("attention sq=4 inputs=") + kind), Error) << kind;
  }
  EXPECT_THROW(Inputs(Case::parse("attention b=2 sq=4 layout=varlen lens_q=1,2,3")), Error);
  EXPECT_THROW(read_case_file("/nowhere/cases.txt"), Error);
}

TEST(CaseText, SaysHowQueriesAndKeysAreDrawn) {
  for (const char* kind :
       {"scale:8", "scale:-0.5", "rising", "sink", "outliers", "nan_tail", "activations:a.safetensors:layer0."}) {
    const std::string line = std::string("attention sq=4 inputs=") + kind;
    EXPECT_EQ(Case::parse(line).to_string(), line);
  }
  EXPECT_EQ(Case::parse("attention sq=4 inputs=normal").to_string(), "attention sq=4");
  const InputKind rising = InputKind::parse("rising"), sink = InputKind::parse("sink");
  const auto score = [](const InputKind& kind, std::int64_t key) {  // of what every query shares, D = 64, 1000 keys
    float sum = 0;
    for (std::int64_t dim = 0; dim < 64; ++dim) sum += kind.query(0, dim, 64) * kind.key(0, key, 1000, dim) / 8;
    return sum;
  };
  EXPECT_FLOAT_EQ(score(rising, 999), 0);
  EXPECT_FLOAT_EQ(score(rising, 0), 999 / 8.0F);
  EXPECT_FLOAT_EQ(score(sink, 0), 24);
  EXPECT_FLOAT_EQ(score(sink, 1), 0);
  EXPECT_FLOAT_EQ(InputKind::parse("outliers").key(1, 97, 1000, 5), 8);
}

TEST(CaseInputs, QueriesThatHeadsShareAreScaledOnce) {
  const std::string line = "attention b=2 sq=3 hq=4 d=8 strides=zero seed=5";
  const Inputs drawn(Case::parse(line)), scaled(Case::parse(line + " inputs=scale:2"));
  const Tensor &from = drawn.bindings()[Slot::q], &to = scaled.bindings()[Slot::q];
  reference::for_each_element(to, [&](std::int64_t, std::int64_t offset) {
    EXPECT_EQ(reference::read(to, offset), 2 * reference::read(from, offset));
  });
}

TEST(CaseInputs, UnusedKeysBecomeNaNAndNoOthers) {
  for (const char* keys :
       {"seqused_k lens_k=20,0,37", "kv=table page=8 lens_k=20,0,37", "kv=csr page=16 lens_k=37,1,16",
        "kv=table page=8 pages=20 pages=shuffled lens_k=20,0,37 strides=gaps",
        "layout=varlen tq=100 lens_q=9,20,37 lens_k=9,20,37"}) {
    const Case one = Case::parse(std::string("attention b=3 sq=37 hkv=2 hq=2 d=16 dtype=bf16 inputs=nan_tail ") + keys);
    Inputs inputs(one);  // which are NaN there already
    const auto nan_of = [&](Slot slot, bool fill) {
      std::vector<bool> nan;
      const Tensor& tensor = inputs.bindings()[slot];
      reference::for_each_element(tensor, [&](std::int64_t, std::int64_t offset) {
        nan.push_back(std::isnan(reference::read(tensor, offset)));
        if (fill) reference::write(tensor, offset, 0.5);
      });
      return nan;
    };
    const std::vector<bool> k = nan_of(Slot::k, true), v = nan_of(Slot::v, true);
    EXPECT_NE(std::count(k.begin(), k.end(), true), 0) << keys;
    poison_unused_keys(one.problem, inputs.bindings());
    EXPECT_EQ(nan_of(Slot::k, false), k) << keys;
    EXPECT_EQ(nan_of(Slot::v, false), v) << keys;
  }
}

/// Element (t, h, c) of a set of tensors is 100 t + 10 h + c / 8, and one more for each tensor that was written before.
class ActivationFile {
 public:
  static constexpr std::int64_t kTokens = 5, kDims = 8;

  explicit ActivationFile(const std::vector<std::pair<std::string, std::int64_t>>& names_and_heads)
      : path_((std::filesystem::temp_directory_path() / name()).string()) {
    std::vector<files::Array> arrays;
    std::vector<files::NamedTensor> tensors;
    for (const auto& [name, heads] : names_and_heads) {
      const auto number = static_cast<std::int64_t>(arrays.size());
      arrays.emplace_back(DType::fp32, std::vector<std::int64_t>{kTokens, heads, kDims});
      for (std::int64_t at = 0; at < kTokens * heads * kDims; ++at) {
        files::store_float(arrays.back().tensor(), at,
                           element(number, at / kDims / heads, at / kDims % heads, at % kDims));
      }
      tensors.push_back({name, arrays.back().tensor()});
    }
    files::write_safetensors(path_, tensors);
  }
  ~ActivationFile() { std::filesystem::remove(path_); }
  ActivationFile(const ActivationFile&) = delete;
  ActivationFile& operator=(const ActivationFile&) = delete;

  static float element(std::int64_t number, std::int64_t token, std::int64_t head, std::int64_t dim) {
    return static_cast<float>(number + 100 * token + 10 * head) + static_cast<float>(dim) / 8;
  }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  static std::string name() { return "tessera-activations-" + std::to_string(::getpid()) + ".safetensors"; }
  std::string path_;
};

TEST(CaseInputs, ActivationsComeFromAFile) {
  // Two query heads to a key head; of the second layer one.
  const ActivationFile file({{"layer0.k", 2},
                             {"layer0.q", 4},
                             {"layer0.v", 2},
                             {"layer1.k", 2},
                             {"layer1.q", 2},
                             {"layer1.v", 2},
                             {"layer1.o", 2}});
  const auto line = [&](const std::string& words) { return "attention d=8 inputs=activations:" + file.path() + words; };
  Inputs inputs(Case::parse(line(" b=3 sq=2 sk=9 hq=9 hkv=3 kv=table page=4 lens_k=9,7,3 pages=shuffled")));
  const Bindings& bindings = inputs.bindings();
  const Case one = Case::parse(line(" b=3 sq=2 sk=9 hq=9 hkv=3 kv=table page=4 lens_k=9,7,3 pages=shuffled"));
  const reference::Sequences sequences = reference::resolve_sequences(one.problem, bindings);
  const std::int64_t lengths[] = {9, 7, 3};
  for (std::int64_t b = 0; b < 3; ++b) {
    const std::int64_t first = b == 1 ? 3 : 0, own_group = b == 1 ? 1 : 2;  // number of the set's k
    for (std::int64_t j = 0; j < lengths[b]; ++j) {
      const reference::Rows& rows = sequences.keys[0][static_cast<std::size_t>(b)];
      const std::int64_t token = reference::key_token(one.problem, bindings, 0, b, rows, j);
      for (std::int64_t h = 0; h < 3; ++h) {
        const std::int64_t at = reference::token_offset(bindings[Slot::k], token, h) + 3;
        EXPECT_EQ(reference::read(bindings[Slot::k], at), ActivationFile::element(first, j % 5, h % 2, 3));
        EXPECT_EQ(reference::read(bindings[Slot::v], at), ActivationFile::element(first + 2, j % 5, h % 2, 3));
      }
    }
    for (std::int64_t i = 0; i < 2; ++i) {
      for (std::int64_t h = 0; h < 9; ++h) {
        const std::int64_t at = reference::token_offset(bindings[Slot::q], b * 2 + i, h) + 3;
        const std::int64_t head = h / 3 % 2 * own_group + h % 3 % own_group;
        EXPECT_EQ(reference::read(bindings[Slot::q], at),
                  ActivationFile::element(first + 1, (lengths[b] - 2 + i) % 5, head, 3));
      }
    }
  }
  const Inputs second(Case::parse(line(":layer1. sq=2")));
  EXPECT_EQ(reference::read(second.bindings()[Slot::k], 0), ActivationFile::element(3, 0, 0, 0));
}

TEST(CaseInputs, ActivationsThatDoNotFitAreRefused) {
  const ActivationFile file({{"k", 2}, {"q", 3}, {"v", 2}, {"x.k", 2}, {"x.q", 2}, {"x.v", 1}, {"y.q", 1}});
  const auto failure = [&](const std::string& words) {
    return run_case(Case::parse("attention sq=4 inputs=activations:" + file.path() + words)).failure;
  };
  EXPECT_NE(failure(" d=16").find("inputs: got q of 8 dims"), std::string::npos) << failure(" d=16");
  EXPECT_NE(failure(" d=8").find("got q, k and v with 3, 2 and 2 heads"), std::string::npos) << failure(" d=8");
  EXPECT_NE(failure(":x. d=8 dv=16").find("got x.v of 8 dims"), std::string::npos);
  EXPECT_NE(failure(":x. d=8").find("2, 2 and 1 heads"), std::string::npos);
  EXPECT_NE(failure(":y. d=8").find("got no tensors that begin with y."), std::string::npos) << failure(":y. d=8");
}

/// Runs a case and returns what the comparison and the search for damage say after `tamper`.
template <class Tamper>
std::string judge(const std::string& line, Tamper tamper) {
  const Case one = Case::parse(line);
  Inputs inputs(one);
  const reference::Result oracle = reference::compute(one.problem, inputs.bindings(), reference::Arithmetic::oracle);
  const reference::Result plain = reference::compute(one.problem, inputs.bindings(), reference::Arithmetic::plain);
  reference::store(oracle, inputs.bindings());
  tamper(inputs.bindings());
  const Comparison comparison = compare(one.problem, inputs.bindings(), oracle, {plain});
  return comparison.passed ? inputs.find_damage(oracle) : comparison.failure;
}

void add(const Tensor& tensor, std::int64_t element, double amount) {
  reference::write(tensor, element, reference::read(tensor, element) + amount);
}

TEST(Judge, AcceptsTheOracle) {
  const auto nothing = [](const Bindings&) {};
  EXPECT_EQ(judge("attention b=2 sq=9 sk=12 hq=2 d=8 causal lse", nothing), "");
  EXPECT_EQ(
      judge("attention b=2 sq=9 sk=12 hq=2 d=8 dtype=bf16 block=4x4 mass=mean next=indices threshold=0.3", nothing),
      "");
  EXPECT_EQ(judge("attention pass=backward b=2 sq=9 sk=12 hq=2 d=8 dtype=fp16 sink", nothing), "");
}

TEST(Judge, AcceptsNotFiniteGradientsOnlyWherePlainOverflows) {
  const auto spoil = [](const Bindings& b) {
    reference::write(b[Slot::dq], 0, std::numeric_limits<double>::quiet_NaN());
  };
  const std::string backward = "attention pass=backward sq=64 sk=256 dtype=fp16 ";
  // In a tile that the forward left out, ALiBi makes P larger than fp16 holds.
  EXPECT_EQ(
      judge("attention pass=backward sq=74 sk=395 hq=3 hkv=1 dtype=fp16 scale=0.2425 softcap=0.5 alibi slopes=batch "
            "block=64x128 list=bitmask:kv bwd_list=transposed:q:1:full seed=13541477 density=0.6",
            spoil),
      "");
  EXPECT_NE(judge(backward, spoil).find("dq: element (0, 0, 0, 0)"), std::string::npos);
}

TEST(Judge, ObjectsToOneWrongElement) {
  const std::string line = "attention b=2 sq=20 sk=12 hq=2 d=8 causal lse";
  EXPECT_NE(judge(line, [](const Bindings& b) { add(b[Slot::o], 600, 2e-5); }).find("o: element"), std::string::npos);
  EXPECT_NE(judge(line, [](const Bindings& b) { add(b[Slot::lse], 70, 2e-5); }).find("lse: element"),
            std::string::npos);
  // The first rows are empty: −inf must be −inf, 0 must be 0.
  EXPECT_NE(judge(line, [](const Bindings& b) { reference::write(b[Slot::lse], 0, -1e30); }), "");
  EXPECT_NE(judge(line, [](const Bindings& b) { reference::write(b[Slot::o], 0, std::nan("")); }), "");
  EXPECT_NE(judge("attention pass=backward sq=9 sk=12 hq=2 d=8", [](const Bindings& b) { add(b[Slot::dk], 7, 1e-4); }),
            "");
}

TEST(Judge, ObjectsToAWrongList) {
  const std::string line = "attention sq=16 sk=16 d=8 block=4x4 next=indices threshold=0.25";
  const auto spoil = [&](Slot slot, std::int64_t at, double value) {
    return judge(line, [&](const Bindings& b) { reference::write(b[slot], at, value); });
  };
  EXPECT_NE(spoil(Slot::next_counts, 1, 4), "");
  EXPECT_NE(spoil(Slot::next_counts, 1, 0), "");
  EXPECT_NE(spoil(Slot::next_indices, 3, 3), "");
  EXPECT_NE(judge("attention sq=16 sk=16 d=8 block=4x4 next=bitmask threshold=0.25",
                  [](const Bindings& b) { reference::write(b[Slot::next_bits], 2, 16); }),
            "");
}

TEST(Judge, FindsDamageOutsideTheOutputs) {
  const std::string varlen = "attention b=2 sq=9 layout=varlen lens_q=9,3 tq=15 lens_k=5,9 hq=2 d=8 lse strides=gaps";
  // Slack tokens, bytes before and behind a tensor, gaps between rows, and inputs.
  EXPECT_NE(judge(varlen, [](const Bindings& b) { reference::write(b[Slot::o], 13 * b[Slot::o].strides[0], 0); }), "");
  EXPECT_NE(judge(varlen, [](const Bindings& b) { reference::write(b[Slot::o], -1, 0); }), "");
  EXPECT_NE(judge(varlen, [](const Bindings& b) { reference::write(b[Slot::o], 8, 0); }), "");
  EXPECT_NE(judge(varlen, [](const Bindings& b) { reference::write(b[Slot::o], 15 * b[Slot::o].strides[0], 0); }), "");
  EXPECT_NE(judge(varlen, [](const Bindings& b) { add(b[Slot::k], 0, 1); }), "");
  EXPECT_EQ(judge(varlen, [](const Bindings&) {}), "");
}

TEST(Judge, SpacingOfNumbers) {
  EXPECT_EQ(ulp(DType::fp32, 1.0), 0x1p-23);
  EXPECT_EQ(ulp(DType::fp32, 1.99), 0x1p-23);
  EXPECT_EQ(ulp(DType::bf16, 2.0), 0x1p-6);
  EXPECT_EQ(ulp(DType::fp16, 0.5), 0x1p-11);
  EXPECT_EQ(ulp(DType::fp16, 0), 0x1p-24);
}

}  // namespace
}  // namespace tessera::cases
