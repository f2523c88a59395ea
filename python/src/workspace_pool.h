// SPDX-License-Identifier: Apache-2.0
// Memory that runs of all plans share. A plan of its own would keep its workspace for good; hundreds of cached plans
// then hold far more than one call needs.
#pragma once

#include <cstddef>
#include <mutex>
#include <new>
#include <vector>

namespace tessera::python {

class WorkspacePool {
 public:
  /// Exclusive use of a block until destruction; any thread, with or without the interpreter lock.
  class Lease {
   public:
    Lease(WorkspacePool& pool, std::size_t bytes) : pool_(pool), block_(pool.take(bytes)) {}
    ~Lease() { pool_.give(block_); }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    [[nodiscard]] void* data() const noexcept { return block_.data; }
    [[nodiscard]] std::size_t bytes() const noexcept { return block_.bytes; }

   private:
    friend class WorkspacePool;
    struct Block {
      void* data = nullptr;
      std::size_t bytes = 0;
    };
    WorkspacePool& pool_;
    Block block_;
  };

  ~WorkspacePool() { clear(); }
  /// Frees every block that no run holds.
  void clear() noexcept;
  /// The pool of the process.
  static WorkspacePool& shared();

 private:
  using Block = Lease::Block;
  Block take(std::size_t bytes);
  void give(Block block) noexcept;

  std::mutex mutex_;
  std::vector<Block> free_;
  std::size_t kept_ = 0;  // bytes in free_
};

}  // namespace tessera::python
