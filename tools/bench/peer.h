// SPDX-License-Identifier: Apache-2.0
// Another implementation in a process of its own, asked for one repetition at a time so that both sides interleave.
#pragma once

#include <sys/types.h>

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "bench/suite.h"
#include "cases/inputs/slot_shapes.h"
#include "tessera/plan.h"

namespace tessera::cli {

/// Speaks one JSON object a line with `python3 <script>` (bench/peers/): {"do": "setup", …problem, "threads": 2,
/// "device": 0, "graph": false} is answered by {"ok": true, "version": …} or {"ok": false, "reason": …}; {"do": "run",
/// "calls": 3} by {"us": of one call}. With "density" below 1 a list keeps that part of the tiles of "block" rows and
/// keys. {"do": "output", "path": FILE}, asked of those whose set-up says "output": true, is answered by {"ok": true}
/// once FILE holds o, in the layout that follows. With "tensors" the peer takes q, k and v, (batch, seqlen, heads, dim)
/// row-major in the problem's type, from those files; without it draws its own from N(0, 1).
class Peer {
 public:
  /// Starts the process. Throws Error{io} when it cannot be started.
  Peer(std::string name, const std::string& script);
  ~Peer();
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  /// What the peer says of itself ("torch 2.13.0"), known after a set-up.
  [[nodiscard]] const std::string& version() const noexcept { return version_; }
  /// nullopt when ready, else why the peer does not do this problem.
  std::optional<std::string> set_up(const BenchCase& bench_case, const Arrays& arrays, const Target& target,
                                    bool as_graph, bool accuracy);
  /// Fills `o`; false if the peer gives none.
  bool fetch_output(const files::Array& o);
  /// Microseconds of one call, the mean of `calls` in a row after `warm_up` untimed ones.
  double run(int calls, int warm_up);

 private:
  nlohmann::json ask(const nlohmann::json& request);
  [[noreturn]] void fail(const std::string& got) const;

  std::string name_;
  std::string version_;
  bool gives_output_ = false;
  pid_t process_ = -1;
  int to_peer_ = -1;
  int from_peer_ = -1;
  std::string buffer_;
};

}  // namespace tessera::cli
