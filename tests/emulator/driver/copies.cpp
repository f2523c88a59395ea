// SPDX-License-Identifier: Apache-2.0
// Asynchronous copies, each done at the time at which it hurts most: what its destination held is gone as soon as the
// copy begins. What cp.async brings is there only once somebody has waited; boxes by TMA come in an order that is
// drawn, and late.
#include <cstring>
#include <vector>

#include "driver/fibres.h"
#include "driver/tensor_map.h"

namespace emulator {
namespace {

struct Copy {
  u32 to, bytes;
  const void* from;  // nullptr: zeros
};
struct Sum {
  float* to;
  u32 from, bytes;
  bool adds;
};

struct Copies {
  std::vector<Copy> begun;                // not committed
  std::vector<std::vector<Copy>> groups;  // the oldest first
  std::vector<Sum> sums;
  std::size_t sums_committed = 0;
};
std::vector<Copies> copies;  // of each thread

// A box of a tensor, by TMA.
struct Box {
  u32 to;
  TensorMap tensor;
  u32 barrier;
  int first[5];  // of each dimension
  Place at;

  [[nodiscard]] u32 row_bytes() const { return tensor.box[0] * tensor.element; }
  [[nodiscard]] u32 lines() const {
    u32 product = 1;
    for (int dim = 1; dim < tensor.rank; ++dim) product *= tensor.box[dim];
    return product;
  }
  void bring() const;
};
std::vector<Box> boxes;  // under way

Copies& own() { return copies[static_cast<std::size_t>(thread())]; }

constexpr int kPoison = 0xff;

}  // namespace

void begin_copies(int threads) {
  copies.assign(static_cast<std::size_t>(threads), {});
  boxes.clear();
}

std::size_t boxes_under_way() { return boxes.size(); }

void bring_box(std::size_t which) {
  const Box box = boxes[which];
  boxes.erase(boxes.begin() + static_cast<std::ptrdiff_t>(which));
  box.bring();
}

void thread_ends_with_copies(Place at) {
  if (!own().sums.empty()) fail("ends while TMA may still read shared memory: no wait behind tma_add", at);
}

void cp_async(u32 to, const void* from, u32 bytes, bool valid, Place at) {
  if (valid && reinterpret_cast<std::uintptr_t>(from) % bytes != 0) fail("cp.async from an address not aligned", at);
  std::memset(shared(to, bytes, at), kPoison, bytes);
  own().begun.push_back({to, bytes, valid ? from : nullptr});
}

void cp_async_commit() {
  Copies& all = own();
  all.groups.push_back(std::move(all.begun));
  all.begun.clear();
}

void cp_async_wait(int pending) {
  Copies& all = own();
  while (static_cast<int>(all.groups.size()) > pending) {
    for (const Copy& copy : all.groups.front()) {
      char* to = shared(copy.to, copy.bytes);
      if (copy.from != nullptr) {
        std::memcpy(to, copy.from, copy.bytes);
      } else {
        std::memset(to, 0, copy.bytes);
      }
    }
    all.groups.erase(all.groups.begin());
  }
}

namespace {

void Box::bring() const {
  for (u32 line = 0; line < lines(); ++line) {
    const char* from = tensor.address;
    bool is_there = true;
    u32 rest = line;
    for (int dim = 1; dim < tensor.rank; ++dim) {
      const std::int64_t index = std::int64_t{first[dim]} + rest % tensor.box[dim];
      rest /= tensor.box[dim];
      is_there = is_there && index >= 0 && index < static_cast<std::int64_t>(tensor.sizes[dim]);
      if (is_there) from += index * static_cast<std::int64_t>(tensor.strides[dim - 1]);
    }
    const u32 size = tensor.element;
    for (u32 c = 0; c < tensor.box[0]; ++c) {
      const std::int64_t column = std::int64_t{first[0]} + c;
      char* place = shared(swizzled(to + line * row_bytes() + c * size, row_bytes()), size, at);
      if (is_there && column >= 0 && column < static_cast<std::int64_t>(tensor.sizes[0])) {
        std::memcpy(place, from + column * size, size);
      } else {
        std::memset(place, 0, size);
      }
    }
  }
  mbarrier_complete(barrier, lines() * row_bytes(), at);
}

// A box at `first` of each dimension, which the tensor need not have.
void load_box(u32 to, const void* map, u32 barrier, int rank, const int (&first)[5], Place at) {
  Box box{to, {}, barrier, {}, at};
  std::memcpy(&box.tensor, map, sizeof(box.tensor));
  std::memcpy(box.first, first, sizeof(first));
  if (to % 128 != 0) fail("TMA to an address that is no multiple of 128", at);
  if (box.tensor.mark != TensorMap::kMark || box.tensor.rank != rank) {
    fail("TMA by what is no tensor map of its rank", at);
  }
  const u32 bytes = box.lines() * box.row_bytes();
  shared(to + bytes - 16, 16, at);
  std::memset(shared(to, 16, at), kPoison, bytes);
  boxes.push_back(box);
}

}  // namespace

void tma_load(u32 to, const void* map, u32 barrier, int column, int head, int row, int batch, Place at) {
  load_box(to, map, barrier, 4, {column, head, row, batch, 0}, at);
}
void tma_load_rows(u32 to, const void* map, u32 barrier, int panel, int eight, int page, Place at) {
  load_box(to, map, barrier, 5, {0, 0, panel, eight, page}, at);
}

namespace {

void begin_bulk(float* to, u32 from, u32 bytes, bool adds, Place at) {
  if (bytes % 16 != 0 || reinterpret_cast<std::uintptr_t>(to) % 16 != 0)
    fail("TMA of what is not aligned to 16 bytes", at);
  if (bytes == 0) return;
  shared(from, 16, at);
  shared(from + bytes - 16, 16, at);
  own().sums.push_back({to, from, bytes, adds});
}

}  // namespace

void tma_add(float* to, u32 from, u32 bytes, Place at) { begin_bulk(to, from, bytes, true, at); }
void tma_store(float* to, u32 from, u32 bytes, Place at) { begin_bulk(to, from, bytes, false, at); }

void tma_commit() { own().sums_committed = own().sums.size(); }

void tma_wait() {
  Copies& all = own();
  for (std::size_t i = 0; i < all.sums_committed; ++i) {
    const Sum& sum = all.sums[i];
    for (u32 offset = 0; offset < sum.bytes; offset += 4) {
      float value;
      std::memcpy(&value, shared(sum.from + offset, 4), 4);
      sum.to[offset / 4] = sum.adds ? sum.to[offset / 4] + value : value;
    }
  }
  all.sums.erase(all.sums.begin(), all.sums.begin() + static_cast<std::ptrdiff_t>(all.sums_committed));
  all.sums_committed = 0;
}

}  // namespace emulator
