// SPDX-License-Identifier: Apache-2.0
#include "bench/peer.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tessera/error.h"

namespace tessera::cli {

using nlohmann::json;
namespace fs = std::filesystem;

namespace {

// Lives as long as this.
class TemporaryFolder {
 public:
  TemporaryFolder() : path_(fs::temp_directory_path() / ("tessera-bench-" + std::to_string(::getpid()))) {
    fs::create_directory(path_);
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  [[nodiscard]] const fs::path& path() const noexcept { return path_; }

 private:
  fs::path path_;
};

// Inputs that a peer cannot draw by itself, in files that live as long as this.
class SharedTensors {
 public:
  SharedTensors(const Arrays& arrays, bool wanted) {
    if (!wanted) return;
    for (const Slot slot : {Slot::q, Slot::k, Slot::v}) {
      const files::Array& array = arrays.at(slot);
      const fs::path path = folder_.path() / to_string(slot);
      std::ofstream(path, std::ios::binary)
          .write(reinterpret_cast<const char*>(array.data()), static_cast<std::streamsize>(array.size_bytes()));
      paths_[std::string(to_string(slot))] = path.string();
    }
  }

  [[nodiscard]] const json& paths() const noexcept { return paths_; }

 private:
  TemporaryFolder folder_;
  json paths_ = json::object();
};

}  // namespace

Peer::Peer(std::string name, const std::string& script) : name_(std::move(name)) {
  std::array<int, 2> down{}, up{};
  if (::pipe2(down.data(), O_CLOEXEC) != 0) fail("no pipe");
  if (::pipe2(up.data(), O_CLOEXEC) != 0) fail("no pipe");
  std::signal(SIGPIPE, SIG_IGN);  // a peer that died is an Error, not the end
  process_ = ::fork();
  if (process_ == 0) {
    ::dup2(down[0], STDIN_FILENO);
    ::dup2(up[1], STDOUT_FILENO);
    ::execlp("python3", "python3", script.c_str(), static_cast<char*>(nullptr));
    ::_exit(127);
  }
  ::close(down[0]);
  ::close(up[1]);
  to_peer_ = down[1];
  from_peer_ = up[0];
  if (process_ < 0) fail("no process");
}

Peer::~Peer() {
  if (to_peer_ >= 0) ::close(to_peer_);  // the peer ends at the end of its input
  if (from_peer_ >= 0) ::close(from_peer_);
  if (process_ > 0) ::waitpid(process_, nullptr, 0);
}

void Peer::fail(const std::string& got) const {
  throw Error(ErrorCode::io, "peer " + name_, got, "python3 with the peer's packages; see bench/peers");
}

json Peer::ask(const json& request) {
  const std::string line = request.dump() + "\n";
  if (::write(to_peer_, line.data(), line.size()) != static_cast<ssize_t>(line.size())) fail("a process that ended");
  std::size_t end = 0;
  while ((end = buffer_.find('\n')) == std::string::npos) {
    std::array<char, 4096> part{};
    const ssize_t got = ::read(from_peer_, part.data(), part.size());
    if (got <= 0) fail("a process that ended");
    buffer_.append(part.data(), static_cast<std::size_t>(got));
  }
  const std::string answer = buffer_.substr(0, end);
  buffer_.erase(0, end + 1);
  json object = json::parse(answer, nullptr, false);
  if (!object.is_object()) fail("'" + answer.substr(0, 80) + "'");
  if (object.contains("error")) fail(object["error"].get<std::string>());
  return object;
}

std::optional<std::string> Peer::set_up(const BenchCase& bench_case, const Arrays& arrays, const Target& target,
                                        bool as_graph, bool accuracy) {
  const Problem& problem = bench_case.problem;
  const bool causal = problem.window == Window{std::nullopt, 0};
  const bool one_type = problem.q_type == problem.k_type && problem.q_type == problem.v_type;
  // The same problem without what the peer is told must be a plain one.
  Problem plain = problem;
  plain.scale.reset();
  plain.window = {};
  plain.lse = plain.deterministic = plain.batch_invariant = false;
  Problem simple;
  simple.operation = plain.operation;
  simple.pass = plain.pass;
  simple.batch = plain.batch;
  simple.seqlen_q = plain.seqlen_q;
  simple.kv.seqlen = plain.kv.seqlen;
  simple.heads_q = plain.heads_q;
  simple.heads_kv = plain.heads_kv;
  simple.head_dim_qk = plain.head_dim_qk;
  simple.head_dim_v = plain.head_dim_v;
  simple.q_type = simple.k_type = simple.v_type = plain.q_type;
  simple.o_type = plain.q_type;
  simple.linear.states = plain.linear.states;
  if (plain.list.form == TileList::Form::indices && !plain.list.full) simple.list = plain.list;
  simple.block_q = plain.block_q;
  simple.block_kv = plain.block_kv;
  if (!bench_case.lengths.empty() || !one_type || plain != simple || (!causal && problem.window != Window{}))
    return "it has no such feature";
  const std::string line = problem.to_string();
  const std::string_view operation = std::string_view(line).substr(0, line.find(' '));
  const bool wants_output = accuracy && problem.operation == Operation::attention;
  const SharedTensors tensors(arrays, wants_output || bench_case.inputs != cases::InputKind{});
  const json answer = ask({{"do", "setup"},
                           {"tensors", tensors.paths()},
                           {"operation", std::string(operation)},
                           {"pass", problem.pass == Pass::forward ? "forward" : "backward"},
                           {"b", problem.batch},
                           {"sq", problem.seqlen_q},
                           {"sk", problem.kv.seqlen},
                           {"hq", problem.heads_q},
                           {"hkv", problem.heads_kv},
                           {"d", problem.head_dim_qk},
                           {"dv", problem.head_dim_v},
                           {"slots", problem.linear.states},
                           {"dtype", std::string(to_string(problem.q_type))},
                           {"causal", causal},
                           {"deterministic", problem.deterministic},
                           {"density", bench_case.density},
                           {"block", {problem.block_q, problem.block_kv}},
                           {"scale", problem.softmax_scale()},
                           {"threads", target.threads},
                           {"device", target.index},
                           {"multiprocessors", target.multiprocessors},
                           {"graph", as_graph}});
  version_ = answer.value("version", "");
  gives_output_ = answer.value("output", false);
  if (!answer.value("ok", false)) return answer.value("reason", "it did not say why");
  return std::nullopt;
}

bool Peer::fetch_output(const files::Array& o) {
  if (!gives_output_) return false;
  const TemporaryFolder folder;
  const fs::path path = folder.path() / "o";
  ask({{"do", "output"}, {"path", path.string()}});
  std::ifstream file(path, std::ios::binary);
  file.read(reinterpret_cast<char*>(o.data()), static_cast<std::streamsize>(o.size_bytes()));
  if (!file || file.peek() != std::ifstream::traits_type::eof()) {
    fail("an output of other than " + std::to_string(o.size_bytes()) + " bytes");
  }
  return true;
}

double Peer::run(int calls, int warm_up) {
  const json answer = ask({{"do", "run"}, {"calls", calls}, {"warm_up", warm_up}});
  if (!answer.contains("us") || !answer["us"].is_number()) fail("no time");
  return answer["us"].get<double>();
}

}  // namespace tessera::cli
