// SPDX-License-Identifier: Apache-2.0
// The command as a user meets it: exit codes, errors in one line, files in and out.
#include "command.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <random>
#include <vector>

#include "fakes/fakes.h"
#include "files/array.h"
#include "files/convert.h"
#include "files/npy.h"
#include "files/safetensors.h"
#include "tessera/attention.h"

namespace tessera::testing {
namespace {

using files::Array;

Array random_array(DType dtype, std::vector<std::int64_t> shape, unsigned seed) {
  Array array(dtype, std::move(shape));
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (std::int64_t at = 0; at < array.tensor().numel(); ++at) files::store_float(array.tensor(), at, normal(random));
  return array;
}

std::vector<float> values(const Array& array) { return files::to_floats(array.tensor()); }

class Command : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(command_path())) GTEST_SKIP() << "no " << command_path() << " in this build";
  }
  void expect_error(const std::string& arguments, int code, const std::string& part) const {
    const Outcome outcome = here.run(arguments);
    EXPECT_EQ(outcome.code, code) << arguments << "\n" << outcome.err;
    EXPECT_EQ(outcome.err.compare(0, 9, "tessera: "), 0) << outcome.err;
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
    EXPECT_NE(outcome.err.find(part), std::string::npos) << outcome.err;
  }
  Workplace here;
};

TEST_F(Command, HelpAndVersion) {
  const Outcome help = here.run("--help");
  EXPECT_EQ(help.code, 0);
  for (const char* verb : {"info", "doctor", "explain", "run", "verify", "bench", "random", "Exit codes"}) {
    EXPECT_NE(help.out.find(verb), std::string::npos) << verb;
  }
  EXPECT_EQ(here.run("run --help").code, 0);
  EXPECT_EQ(here.run("--version").out.compare(0, 8, "tessera "), 0);
}

// Processors of a brand without a number are told apart by family and model.
TEST_F(Command, ResultsAreSavedUnderTheProcessor) {
  std::filesystem::create_directories(here.file("bench/suites"));
  here.write("bench/suites/small.txt", "attention sq=8 d=32\n");
  ASSERT_EQ(here.run("bench bench/suites/small.txt -r 1 --save").code, 0);
  const nlohmann::json info = nlohmann::json::parse(here.run("info --json").out);
  const auto machine = info.at("cpu").get<std::string>() + " " + info.at("identity").get<std::string>();
  const auto folder = std::filesystem::directory_iterator(here.file("bench/results"))->path();
  EXPECT_TRUE(std::filesystem::exists(folder / "small.json"));
  int family = 0, model = 0;
  if (std::sscanf(machine.c_str(), "AMD EPYC family %d model %d", &family, &model) == 2) {
    EXPECT_EQ(
        folder.filename().string().find("amd-epyc-f" + std::to_string(family) + "-m" + std::to_string(model) + "-"), 0);
  }
}

// A problem may be longer than a file's name can be.
TEST_F(Command, LongProblemsAreMeasured) {
  std::string lengths = "8";
  for (int i = 1; i < 150; ++i) lengths += ",8";
  const Outcome outcome = here.run("bench 'attention b=150 sq=8 d=16 layout=varlen tq=1200 lens=" + lengths + "' -r 1");
  EXPECT_EQ(outcome.code, 0) << outcome.out << outcome.err;
}

TEST_F(Command, BadUsageIsTwo) {
  expect_error("", 2, "subcommand");
  expect_error("explode", 2, "explode");
  expect_error("explain", 2, "problem");
  expect_error("explain attention sq=4 colour=red", 2, "colour");
  expect_error("explain attention sq=4 hq=3 hkv=2", 2, "heads_kv");
  expect_error("run --in q.txt --out o.npy", 2, "q.txt");
  expect_error("bench 'attention sq=8 density=0.5'", 2, "density");
  expect_error("bench 'attention sq=8 state_slots=in_order'", 2, "state_slots");
  expect_error("bench 'attention sq=8' --multiprocessors 8", 2, "--multiprocessors");
  expect_error("bench 'attention sq=8 lens=8'", 2, "lens");
  expect_error("bench 'attention b=2 sq=8 layout=varlen lens=8'", 2, "lens");
  expect_error("bench 'attention b=2 sq=8 layout=varlen lens=8,9'", 2, "lens");
  expect_error("bench 'attention b=2 sq=8 layout=varlen list=indices lens=8,8'", 2, "lens");
  expect_error("bench 'attention b=2 sq=8 layout=varlen kv=dense lens=8,8'", 2, "keys packed too or in a cache");
  expect_error("bench 'attention b=2 sq=8 sk=4 layout=varlen kv=table page=2 lens=9x2'", 2, "want 0 to sq");
  expect_error("bench 'attention b=2 sq=8 layout=varlen lens=8x'", 2, "lens=100x8,300");
  expect_error("bench 'attention b=2 sq=8 layout=varlen lens=8x0'", 2, "lens=100x8,300");
  expect_error("bench 'attention sq=8 lens_k=8'", 2, "lens_k");
  expect_error("bench 'attention sq=8 layout=varlen seqused_k lens_k=8'", 2, "lens_k");
  expect_error("bench 'attention b=3 sq=8 seqused_k lens_k=8,7'", 2, "got 2 lengths; want 1, or one for each of 3");
  expect_error("bench 'attention sq=8 seqused_k lens_k=9'", 2, "got 9; want 0 to sk, 8");
  expect_error("bench 'attention sq=8 seqused_k inputs=nan_tail'", 2, "lens_k=");
  expect_error("bench 'attention sq={8,16'", 2, "braces");
  expect_error("bench 'attention sq=8' --max-regression lots", 2, "lots");
  expect_error("bench 'attention sq=8' --graph", 2, "--device cuda");
}

TEST_F(Command, NumbersOutOfTheirRangeAreRefusedByName) {
  for (const char* count : {"-1", "0", "1e3", "010x", "0x10", "18446744073709551616", "''"}) {
    expect_error(std::string("random --count ") + count, 2, "--count: got '");
  }
  for (const char* verb :
       {"random --seed ", "run --in q=q.npy --out o.npy --seed ", "run --in q=q.npy --out o.npy --offset "}) {
    expect_error(std::string(verb) + "18446744073709551616", 2, "want an integer from 0 to 18446744073709551615");
    expect_error(std::string(verb) + "-1", 2, "want an integer from 0");
  }
  for (const char* seconds : {"nan", "0", "-1", "inf"}) {
    expect_error(std::string("random --seconds ") + seconds, 2, "--seconds: got '");
  }
  expect_error("random --queries 0", 2, "--queries: got '0'; want an integer from 1 to 256");
  expect_error("random --jobs 0", 2, "--jobs: got '0'; want an integer from 1 to 1024");
  expect_error("compile --arch sm_80 --jobs 2.5 'attention sq=8'", 2, "--jobs: got '2.5'");
  expect_error("explain attention sq=4 --threads -2", 2, "--threads: got '-2'");
  for (const char* option : {"--warm-up", "--repetitions", "-r", "--multiprocessors", "--threads"}) {
    expect_error(std::string("bench 'attention sq=8' ") + option + " -1", 2, "got '-1'; want an integer from ");
  }
  // 2^64 - 1 is a seed, and 010 is ten.
  EXPECT_EQ(here.run("random --print-only --count 2 --seed 18446744073709551615").code, 0);
  EXPECT_EQ(here.run("random --print-only --count 010").out, here.run("random --print-only --count 10").out);
  expect_error("random --match pass=sideways", 2, "--match: got 'pass=sideways', which none of 100000 problems has");
  expect_error("random --values 0", 2, "--values: got '0'; want an integer from 1 to 1000000");
}

TEST_F(Command, UnsupportedIsThreeAndFilesAreFour) {
  expect_error("explain attention sq=4 --wish implementation=cpu.none", 3, "cpu.tiled");
  expect_error("run --in missing.safetensors --out o.npy", 4, "missing.safetensors");
  expect_error("bench missing.txt", 4, "missing.txt");
  here.write("broken.npy", "no array");
  expect_error("run --in q=broken.npy --out o.npy", 2, "broken.npy");
  EXPECT_FALSE(here.has("o.npy"));
}

TEST_F(Command, TextsOfCallablesAreReadAndChecked) {
  here.write("half.txt", "score * 0.5F + bias(at.head)");
  const std::string compile = "compile --arch sm_80 --nvrtc nowhere 'attention sq=64 d=64 dtype=bf16 score=half' ";
  expect_error("bench 'attention sq=8' --score-text half", 2, "NAME=FILE");
  expect_error("bench 'attention sq=8' --mask-text half=half.txt,bias", 2, "EXTRA:DTYPE:RANK");
  expect_error("bench 'attention sq=8' --mask-text half=half.txt,bias:fp31:1", 2, "fp31");
  expect_error("bench 'attention sq=8' --score-text half=missing.txt", 4, "missing.txt");
  expect_error("bench 'attention sq=8' --score-text relative=half.txt", 2, "built in");
  expect_error("bench 'attention sq=8' --score-text half=half.txt --score-text half=half.txt", 2, "each NAME once");
  expect_error("bench 'attention sq=8' --score-derivative half=half.txt", 2, "the NAME of a --score-text");
  expect_error("bench 'attention sq=8' --score-text half=half.txt --score-derivative half=half.txt,bias:fp32:1", 2,
               "extra tensors are those of the score");
  expect_error("bench 'attention sq=8 score=half' --score-text half=half.txt,bias:fp32:1", 2, "extra0");
  expect_error("bench 'attention sq=8 score=half' --score-text half=half.txt", 2, "no host function");
  expect_error(compile, 3, "nowhere");  // the compiler is looked for first
}

TEST_F(Command, KernelsThatSpillOrWaitFail) {
  const auto compile = [&](const std::string& source) {
    here.write("kernel.cu", source);
    return here.run("compile --arch sm_90a --nvrtc " + fake_nvrtc_path() + " --source kernel.cu");
  };
  EXPECT_EQ(compile("text").code, 0);
  EXPECT_EQ(compile("#pragma spill").code, 1);
  const Outcome waits = compile("#pragma serialize");
  EXPECT_EQ(waits.code, 1);
  EXPECT_NE(waits.out.find("C7510"), std::string::npos) << waits.out;
}

TEST_F(Command, InfoAndExplain) {
  const Outcome info = here.run("info --json");
  ASSERT_EQ(info.code, 0);
  const auto object = nlohmann::json::parse(info.out);
  EXPECT_FALSE(object["isas"].empty());
  EXPECT_GT(object["cores"].get<int>(), 0);
  const std::string decode = "explain 'attention sq=1 sk=65536 hq=8 hkv=1 d=128 dtype=bf16' ";
  const Outcome absent = here.run(decode + "--arch sm_120 --multiprocessors 170");  // needs no GPU
  EXPECT_EQ(absent.code, 0) << absent.err;
  EXPECT_NE(absent.out.find("sm=120"), std::string::npos) << absent.out;
  EXPECT_NE(absent.out.find("multiprocessors=170"), std::string::npos) << absent.out;
  EXPECT_NE(absent.out.find("cuda.fwd_decode"), std::string::npos) << absent.out;
  EXPECT_EQ(absent.out.find("splits:         1\n"), std::string::npos) << absent.out;
  EXPECT_NE(here.run(decode + "--arch sm_120").out.find("splits:         1\n"), std::string::npos);
  expect_error(decode + "--arch 120", 2, "arch");
  expect_error(decode + "--arch sm_120 --device cuda", 2, "--device");
  expect_error(decode + "--multiprocessors 3", 2, "--arch");
  expect_error(decode + "--emulate sm80", 2, "--device cuda");
  const Outcome explain = here.run("explain attention sq=64 causal --wish tile_kv=64 --threads 1");
  EXPECT_EQ(explain.code, 0) << explain.err;
  EXPECT_NE(explain.out.find("cpu.reference"), std::string::npos);
}

TEST_F(Command, RunEqualsTheLibrary) {
  const Array q = random_array(DType::bf16, {2, 9, 4, 16}, 1), k = random_array(DType::bf16, {2, 13, 2, 16}, 2),
              v = random_array(DType::bf16, {2, 13, 2, 24}, 3);
  files::write_npy(here.file("q.npy"), q.tensor());
  files::write_npy(here.file("k.npy"), k.tensor());
  files::write_npy(here.file("v.npy"), v.tensor());
  const Outcome outcome = here.run("run --in q=q.npy --in k=k.npy --in v=v.npy --out o.npy causal lse");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const Array o(DType::bf16, {2, 9, 4, 24}), lse(DType::fp32, {2, 4, 9});
  AttentionOptions options;
  options.causal = true;
  attention(q.tensor(), k.tensor(), v.tensor(), o.tensor(), options, lse.tensor());
  EXPECT_EQ(values(files::read_npy(here.file("o.npy"))), values(o));
  EXPECT_EQ(values(files::read_npy(here.file("o.lse.npy"))), values(lse));
}

TEST_F(Command, RunTakesOperandsOf8BitsWithTheirDescales) {
  Bindings bindings;
  std::vector<Array> arrays;
  std::string arguments;
  const auto bind = [&](Slot slot, Array array) {
    const std::string name(to_string(slot));
    files::write_npy(here.file(name + ".npy"), array.tensor());
    arguments += " --in " + name + "=" + name + ".npy";
    bindings[slot] = array.tensor();
    arrays.push_back(std::move(array));
  };
  bind(Slot::q, random_array(DType::int8, {2, 9, 4, 16}, 1));
  bind(Slot::k, random_array(DType::int8, {2, 13, 2, 16}, 2));
  bind(Slot::v, random_array(DType::bf16, {2, 13, 2, 24}, 3));
  bind(Slot::k_mean, random_array(DType::fp32, {2, 2, 16}, 4));
  for (const auto& [slot, tokens] : {std::pair{Slot::q_descale, 9}, std::pair{Slot::k_descale, 13}}) {
    Array ones(DType::fp32, {2, slot == Slot::q_descale ? 4 : 2, tokens});
    std::fill_n(ones.tensor().as<float>(), ones.tensor().numel(), 1.5F);
    bind(slot, std::move(ones));
  }
  const Outcome outcome = here.run("run" + arguments + " --out o.npy descale=token");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const Array o(DType::bf16, {2, 9, 4, 24});
  bindings[Slot::o] = o.tensor();
  const char* line = "attention b=2 sq=9 sk=13 hq=4 hkv=2 d=16 dv=24 dtype=int8:int8:bf16:bf16 descale=token smooth";
  Executor(make_plan(Problem::parse(line))).run(bindings);
  EXPECT_EQ(values(files::read_npy(here.file("o.npy"))), values(o));
  expect_error("run --in q=q.npy --out o.npy quantize", 3, "tessera.quantize of Python has it");
}

TEST_F(Command, BackwardOfThreeDimensionsWithPrefixRunsTheForwardFirst) {
  const Array q = random_array(DType::fp32, {11, 4, 16}, 1), k = random_array(DType::fp32, {11, 2, 16}, 2),
              v = random_array(DType::fp32, {11, 2, 16}, 3), dout = random_array(DType::fp32, {11, 4, 16}, 4);
  files::write_safetensors(here.file("in.safetensors"), {{"layer3.q", q.tensor()},
                                                         {"layer3.k", k.tensor()},
                                                         {"layer3.v", v.tensor()},
                                                         {"layer3.dout", dout.tensor()},
                                                         {"layer3.other", q.tensor()},
                                                         {"q", k.tensor()}});
  const Outcome outcome =
      here.run("run --quiet --in in.safetensors --prefix layer3. --out out.safetensors -- pass=backward causal");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, "");
  const auto batched = [](const Array& array, std::int64_t heads) {
    return Tensor::contiguous(array.data(), DType::fp32, {1, 11, heads, 16});
  };
  const Array o(DType::fp32, {1, 11, 4, 16}), lse(DType::fp32, {1, 4, 11}), dq(DType::fp32, {1, 11, 4, 16}),
      dk(DType::fp32, {1, 11, 2, 16}), dv(DType::fp32, {1, 11, 2, 16});
  AttentionOptions options;
  options.causal = true;
  attention(batched(q, 4), batched(k, 2), batched(v, 2), o.tensor(), options, lse.tensor());
  attention_backward(batched(q, 4), batched(k, 2), batched(v, 2), o.tensor(), lse.tensor(), batched(dout, 4),
                     dq.tensor(), dk.tensor(), dv.tensor(), options);
  const files::SafetensorsFile out(here.file("out.safetensors"));
  for (const auto& [name, want] :
       std::vector<std::pair<const char*, const Array*>>{{"dq", &dq}, {"dk", &dk}, {"dv", &dv}}) {
    const Array got = out.load(name);
    EXPECT_EQ(got.shape().size(), 3U);
    const std::vector<float> a = values(got), b = values(*want);
    ASSERT_EQ(a.size(), b.size());
    for (std::size_t at = 0; at < a.size(); ++at) EXPECT_NEAR(a[at], b[at], 1e-5) << name << " " << at;
  }
}

TEST_F(Command, BenchWritesRowsAndFindsRegressions) {
  here.write("suite.txt", "# two lengths, two masks\nattention sq={16,32} hq=2 d=16 {,causal} # four rows\n\n");
  const Outcome first = here.run("bench suite.txt --pass both --repetitions 3 --json a.json --csv a.csv --threads 1");
  ASSERT_EQ(first.code, 0) << first.err;
  const auto results = nlohmann::json::parse(here.text("a.json"));
  ASSERT_EQ(results["rows"].size(), 8U);
  EXPECT_EQ(results["rows"][1]["pass"], "backward");
  EXPECT_EQ(results["rows"][2]["problem"], "attention sq=16 hq=2 d=16 causal");
  for (const auto& row : results["rows"]) EXPECT_GT(row["us"].get<double>(), 0);
  // 16 · 16 pairs of 2 heads, 2 · (16 + 16) operations each.
  EXPECT_NEAR(results["rows"][0]["gflop"].get<double>() / (16 * 16 * 2 * 64e-9), 1, 1e-5);
  EXPECT_EQ(here.text("a.csv").compare(0, 13, "problem,pass,"), 0);

  auto faster = results;
  for (auto& row : faster["rows"]) row["us"] = row["us"].get<double>() / 100;
  here.write("faster.json", faster.dump());
  const std::string again = "bench suite.txt --repetitions 3 --threads 1 --compare faster.json";
  EXPECT_EQ(here.run(again).code, 0);
  const Outcome regression = here.run(again + " --max-regression 50%");
  EXPECT_EQ(regression.code, 1);
  EXPECT_NE(regression.out.find("REGRESSION"), std::string::npos);
}

TEST_F(Command, BenchCountsPackedSequencesAsLongAsTheyAre) {
  const auto gflop = [&](const std::string& words) {
    const std::string line = "'attention b=2 sq=32 layout=varlen tq=32 tk=32 hq=2 d=16 " + words + "'";
    const Outcome outcome = here.run("bench " + line + " --repetitions 1 --threads 1 --json a.json");
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return nlohmann::json::parse(here.text("a.json"))["rows"][0]["gflop"].get<double>();
  };
  EXPECT_NEAR(gflop("") / (2 * 16 * 16 * 2 * 64e-9), 1, 1e-5) << "32 tokens shared";
  EXPECT_NEAR(gflop("lens=24,8") / ((24 * 24 + 8 * 8) * 2 * 64e-9), 1, 1e-5);
  EXPECT_NEAR(gflop("lens=16x2") / (2 * 16 * 16 * 2 * 64e-9), 1, 1e-5);
}

TEST_F(Command, BenchCountsMixedBatchesWithACache) {
  for (const char* keys : {"kv=dense seqused_k", "kv=table page=16", "kv=csr page=16"}) {
    const std::string line =
        "'attention b=4 sq=32 sk=64 layout=varlen tq=42 hq=2 d=16 lens=32,8,1x2 lens_k=32,40,64,0 " +
        std::string(keys) + "'";
    const Outcome outcome = here.run("bench " + line + " --repetitions 1 --threads 1 --json a.json");
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    const auto row = nlohmann::json::parse(here.text("a.json"))["rows"][0];
    EXPECT_NEAR(row["gflop"].get<double>() / ((32 * 32 + 8 * 40 + 64) * 2 * 64e-9), 1, 1e-5);
  }
}

TEST_F(Command, BenchDrawsInputsAsALineSays) {
  const Outcome outcome = here.run(
      "bench 'attention sq=32 hq=2 d=16 inputs={normal,scale:8,rising}' --repetitions 1 --threads 1 --json a.json");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const auto rows = nlohmann::json::parse(here.text("a.json"))["rows"];
  ASSERT_EQ(rows.size(), 3U);
  EXPECT_EQ(rows[0]["problem"].get<std::string>().find("inputs="), std::string::npos);
  EXPECT_NE(rows[1]["problem"].get<std::string>().find(" inputs=scale:8"), std::string::npos);
  EXPECT_EQ(here.run("bench 'attention sq=32 inputs=large' --repetitions 1").code, 2);
  EXPECT_EQ(here.run("bench 'linear_decode b=2 h=2 d=64 inputs=rising' --repetitions 1").code, 2);
}

// What a forward lost of o, int8, is an input of a backward.
TEST_F(Command, BenchMeasuresTheResidualBothWays) {
  const Outcome outcome = here.run("bench 'attention sq=32 hq=2 d=16 dtype=bf16 residual' --pass both --repetitions 1");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
}

TEST_F(Command, BenchCountsTheKeysThatACacheHolds) {
  for (const char* keys : {"seqused_k", "kv=table page=16", "kv=csr page=16"}) {
    const std::string line = "'attention b=2 sq=2 sk=64 hq=2 d=16 " + std::string(keys) +
                             " lens_k={40,64,50,17,0} inputs={normal,nan_tail}'";
    const Outcome outcome = here.run("bench " + line + " --repetitions 1 --threads 1 --json a.json");
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    const auto rows = nlohmann::json::parse(here.text("a.json"))["rows"];
    ASSERT_EQ(rows.size(), 10U);
    EXPECT_NE(rows[1]["problem"].get<std::string>().find(" inputs=nan_tail lens_k=40"), std::string::npos);
    for (std::size_t at = 0; at < 8; ++at) {
      const int keys_each = at < 2 ? 40 : at < 4 ? 64 : at < 6 ? 50 : 17;
      EXPECT_NEAR(rows[at]["gflop"].get<double>() / (2 * 2 * 2 * keys_each * 64e-9), 1, 1e-5);
      const int bytes = 2 * 2 * 2 * 16 * 4 * 2 + 2 * 2 * 2 * keys_each * 16 * 4;
      EXPECT_NEAR(rows[at]["gbyte"].get<double>() / (bytes * 1e-9), 1, 1e-5);
    }
  }
}

TEST_F(Command, BenchTellsHowFarOutputsAreFromDoublePrecision) {
  // Of one key the output is its value. The peer gives twice that.
  here.write("twice.py", R"(
import json, struct, sys
for line in sys.stdin:
    request = json.loads(line)
    answer = {"us": 5.0}
    if request["do"] == "setup":
        data = open(request["tensors"]["v"], "rb").read()
        values = [2 * x for x in struct.unpack(f"<{len(data) // 4}f", data)]
        answer = {"ok": True, "version": "1", "output": request["sk"] == 1}
    elif request["do"] == "output":
        open(request["path"], "wb").write(struct.pack(f"<{len(values)}f", *values))
        answer = {"ok": True}
    print(json.dumps(answer), flush=True)
)");
  here.write("suite.txt",
             "attention b=2 sq=1 sk=1 hq=2 d=16\n"
             "attention sq=70 hq=4 hkv=2 d=32 dtype=bf16 window=20:3 softcap=5 inputs=scale:4\n"
             "attention b=3 sq=9 sk=80 hq=2 d=32 causal kv=table page=16 lens_k=80,9,33 inputs=nan_tail\n"
             "attention b=2 sq=60 hq=2 d=32 layout=varlen tq=100 lens=60,33 chunk=20\n"
             "attention sq=8 d=16 alibi\n");
  const std::string bench = "bench suite.txt --repetitions 1 --threads 1 --peer twice --peer-folder . --json a.json";
  const Outcome outcome = here.run(bench + " --accuracy");
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const auto rows = nlohmann::json::parse(here.text("a.json"))["rows"];
  ASSERT_EQ(rows.size(), 5U);
  EXPECT_EQ(rows[0]["error"], 0);
  EXPECT_NEAR(rows[0]["peer_errors"]["twice"].get<double>(), 1, 1e-6);
  EXPECT_NE(outcome.out.find("twice error"), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.out.find("1.00e+00"), std::string::npos) << outcome.out;
  for (std::size_t at = 1; at < 4; ++at) {
    EXPECT_GT(rows[at]["error"].get<double>(), at == 1 ? 1e-4 : 1e-9) << rows[at];
    EXPECT_LT(rows[at]["error"].get<double>(), at == 1 ? 1e-2 : 1e-6) << rows[at];
  }
  EXPECT_FALSE(rows[4].contains("error"));
  EXPECT_FALSE(rows[4].contains("peer_errors"));
}

TEST_F(Command, BenchDrawsTileListsAndExpandsWishes) {
  const std::string line = "'attention sq=256 hq=2 d=16 block=32x32 list={indices,bitmask,transposed} density=0.25'";
  const Outcome outcome =
      here.run("bench " + line + " --wish tile_kv=64,128 --repetitions 1 --threads 1 --json a.json");
  ASSERT_EQ(outcome.code, 0) << outcome.err << outcome.out;
  const auto rows = nlohmann::json::parse(here.text("a.json"))["rows"];
  ASSERT_EQ(rows.size(), 6U);
  EXPECT_EQ(rows[1]["wishes"], "tile_kv=128");
  // Two of the eight key blocks of every query block.
  for (const auto& row : rows) EXPECT_NEAR(row["gflop"].get<double>() / (256.0 * 64 * 2 * 64e-9), 1, 1e-5);
  ASSERT_EQ(here.run("bench " + line + " --repetitions 1 --threads 1 --json a.json --merge").code, 0);
  EXPECT_EQ(nlohmann::json::parse(here.text("a.json"))["rows"].size(), 9U);
}

TEST_F(Command, BenchSweepsWishesBesideThePlansOwnChoice) {
  const std::string line = "'attention sq={64,128} hq=2 d=16'";
  const Outcome outcome =
      here.run("bench " + line + " --sweep --wish tile_kv=64,128 --repetitions 1 --threads 1 --json a.json");
  ASSERT_EQ(outcome.code, 0) << outcome.err << outcome.out;
  const auto rows = nlohmann::json::parse(here.text("a.json"))["rows"];
  ASSERT_EQ(rows.size(), 6U);
  EXPECT_EQ(rows[0]["wishes"], "");
  EXPECT_EQ(rows[5]["wishes"], "tile_kv=128");
  const std::string winners = outcome.out.substr(outcome.out.find("# winners"));
  EXPECT_NE(winners.find("attention sq=64 hq=2 d=16"), std::string::npos) << winners;
  EXPECT_NE(winners.find("attention sq=128 hq=2 d=16"), std::string::npos) << winners;
}

}  // namespace
}  // namespace tessera::testing
