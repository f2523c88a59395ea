// SPDX-License-Identifier: Apache-2.0
// Applies expressions, ALiBi and dropout to a tile of scores, 64 lanes per step. Included once per instruction set,
// after expression-inl.h.
HWY_BEFORE_NAMESPACE();
namespace tessera::cpu {
namespace HWY_NAMESPACE {

/// The steps of a program on one tile.
class LaneRun {
 public:
  LaneRun(const LaneProgram& program, const LaneTile& tile, bool derivative)
      : program_(program), tile_(tile), derivative_(derivative) {}

  /// Calls sink.take(run, scores of a line, live lanes, their offset in the tile) when the results are in their slots.
  template <class Sink>
  void run(const Sink& sink) {
    stage(LaneStage::fixed);
    for (std::int64_t outer = 0; outer < tile_.outer; outer += kWide) {
      outer_ = outer;
      stage(LaneStage::outer);
      for (inner_ = 0; inner_ < tile_.inner; inner_ += kWide) {
        stage(LaneStage::inner);
        const std::int64_t live = std::min<std::int64_t>(kWide, tile_.inner - inner_);
        for (line_ = 0; line_ < std::min<std::int64_t>(kWide, tile_.outer - outer); ++line_) {
          stage(LaneStage::element);
          sink.take(*this, tile_.s + (outer + line_) * tile_.stride + inner_, live,
                    (outer + line_) * tile_.stride + inner_);
        }
      }
    }
  }

  /// An operand of a step of the stage.
  template <class T>
  Lanes<T> lanes(const LaneOperand& operand, LaneStage stage) {
    const T* at = lanes_of(slots_[operand.slot], T{});
    if (operand.stage == stage || operand.stage == LaneStage::inner) return {at, false};
    return {at + (operand.stage == LaneStage::outer ? line_ : 0), true};
  }

 private:
  void stage(LaneStage stage) {
    const int index = static_cast<int>(stage);
    for (int i = index == 0 ? 0 : program_.end[index - 1]; i < program_.end[index]; ++i) {
      const LaneStep& step = program_.steps[i];
      if (step.in_value || derivative_) compute(step);
    }
  }

  void compute(const LaneStep& step) {
    LaneSlot& out = slots_[step.out];
    switch (step.op) {
      case ExprOp::constant:
        return constant(step, out);
      case ExprOp::score:
        return scores(out.real);
      case ExprOp::batch:
        std::fill_n(out.integer, kWide, tile_.batch);
        return;
      case ExprOp::head:
        return heads(step.stage, out.integer);
      case ExprOp::query:
      case ExprOp::key:
        return positions(step.stage, out.integer);
      case ExprOp::load: {
        Lanes<std::int64_t> index[4];
        for (int k = 0; k < step.operands; ++k) index[k] = lanes<std::int64_t>(step.from[k], step.stage);
        return load_lanes(tile_.tensors[step.tensor], step.operands, index, out);
      }
      case ExprOp::select:
        if (step.type == ExprType::real) return select<float>(step, out.real);
        return select<std::int64_t>(step, out.integer);
      default:
        break;
    }
    const LaneOperand& first = step.from[0];
    const LaneOperand& second = step.from[step.operands - 1];
    if (step.operand == ExprType::real) {
      of_reals(step.op, lanes<float>(first, step.stage), lanes<float>(second, step.stage), out);
    } else if (step.operand == ExprType::integer) {
      of_integers(step.op, lanes<std::int64_t>(first, step.stage), lanes<std::int64_t>(second, step.stage), out);
    } else {
      of_truths(step.op, lanes<std::int32_t>(first, step.stage), lanes<std::int32_t>(second, step.stage), out);
    }
  }

  template <class T>
  void select(const LaneStep& step, T* out) {
    select_lanes(lanes<std::int32_t>(step.from[0], step.stage), lanes<T>(step.from[1], step.stage),
                 lanes<T>(step.from[2], step.stage), out);
  }

  static void constant(const LaneStep& step, LaneSlot& out) {
    if (step.type == ExprType::real) {
      std::fill_n(out.real, kWide, step.real);
    } else if (step.type == ExprType::integer) {
      std::fill_n(out.integer, kWide, step.integer);
    } else {
      std::fill_n(out.truth, kWide, static_cast<std::int32_t>(step.integer));
    }
  }

  void scores(float* out) const {
    const std::int64_t live = std::min<std::int64_t>(kWide, tile_.inner - inner_);
    std::copy_n(tile_.s + (outer_ + line_) * tile_.stride + inner_, live, out);
    std::fill(out + live, out + kWide, 0.0F);
  }

  // Lanes past the end repeat the last position, which is valid.
  void positions(LaneStage stage, std::int64_t* out) const {
    const bool inner = stage == LaneStage::inner;
    const std::int64_t first = inner ? inner_ : outer_;
    const std::int64_t live = std::min<std::int64_t>(kWide, (inner ? tile_.inner : tile_.outer) - first);
    std::copy_n((inner ? tile_.inner_position : tile_.outer_position) + first, live, out);
    std::fill(out + live, out + kWide, out[live - 1]);
  }

  void heads(LaneStage stage, std::int64_t* out) const {
    const bool inner = stage == LaneStage::inner;
    const std::int64_t first = inner ? inner_ : outer_;
    const std::int64_t last = (inner ? tile_.inner : tile_.outer) - 1;
    for (std::int64_t i = 0; i < kWide; ++i) out[i] = tile_.head[std::min(first + i, last)] + tile_.head_offset;
  }

  const LaneProgram& program_;
  const LaneTile& tile_;
  bool derivative_;
  std::int64_t outer_ = 0, inner_ = 0, line_ = 0;
  LaneSlot slots_[kExpressionSlots];
};

// Writes the results: all lanes by vectors, or the live ones one by one if the tile ends before.
template <class Write>
HWY_INLINE void for_live(std::int64_t live, const Write& write) {
  if (live == kWide) {
#pragma omp simd
    for (int i = 0; i < kWide; ++i) write.at(i);
  } else {
    for (std::int64_t i = 0; i < live; ++i) write.at(static_cast<int>(i));
  }
}

/// Returns an operand as one number per lane; `space` is scratch for one that is the same in all lanes.
template <class T>
HWY_INLINE const T* every_lane(const Lanes<T>& operand, T* space) {
  if (!operand.single) return operand.at;
  std::fill_n(space, kWide, *operand.at);
  return space;
}

struct WriteScore {
  const float* HWY_RESTRICT value;
  float* HWY_RESTRICT s;
  HWY_INLINE void at(int i) const { s[i] = default_nan(value[i]); }
};
struct MultiplySlope {
  const float* HWY_RESTRICT value;
  float* HWY_RESTRICT slope;
  HWY_INLINE void at(int i) const { slope[i] *= default_nan(value[i]); }
};
struct HideScore {
  const std::int32_t* HWY_RESTRICT visible;
  float* HWY_RESTRICT s;
  HWY_INLINE void at(int i) const { s[i] = visible[i] != 0 ? s[i] : -std::numeric_limits<float>::infinity(); }
};

struct ScoreSink {
  const LaneProgram& program;
  float* derivative;

  void take(LaneRun& run, float* s, std::int64_t live, std::ptrdiff_t at) const {
    alignas(64) float space[kWide];
    if (derivative != nullptr) {
      const float* slope = every_lane(run.lanes<float>(program.derivative, LaneStage::element), space);
      for_live(live, MultiplySlope{slope, derivative + at});
    }
    for_live(live, WriteScore{every_lane(run.lanes<float>(program.value, LaneStage::element), space), s});
  }
};

struct MaskSink {
  const LaneProgram& program;

  void take(LaneRun& run, float* s, std::int64_t live, std::ptrdiff_t /*at*/) const {
    alignas(64) std::int32_t space[kWide];
    for_live(live, HideScore{every_lane(run.lanes<std::int32_t>(program.value, LaneStage::element), space), s});
  }
};

void run_score(const LaneProgram& program, const LaneTile& tile, float* derivative) {
  LaneRun(program, tile, derivative != nullptr).run(ScoreSink{program, derivative});
}

void run_mask(const LaneProgram& program, const LaneTile& tile) {
  LaneRun(program, tile, false).run(MaskSink{program});
}

// s -= slope · distance for scores of a line. Each result is the same, bit for bit, at every place in a tile.
HWY_INLINE void subtract_products(const float* slope, const float* distance, std::int64_t live, float* s) {
  const FloatTag d;
  alignas(64) float last[kWide] = {};
  const std::int64_t whole = live - live % kLanes;
  std::copy_n(s + whole, live - whole, last);
  for (std::int64_t i = 0; i < live; i += kLanes) {
    float* const at = i < whole ? s + i : last;
    hn::StoreU(hn::NegMulAdd(hn::Load(d, slope + i), hn::Load(d, distance + i), hn::LoadU(d, at)), d, at);
  }
  std::copy_n(last, live - whole, s + whole);
}

// Positions near the lanes' first one are subtracted as floats, which represent all integers up to 2^24.
void subtract_distances(const LaneTile& tile, const float* slopes, std::ptrdiff_t slope_stride) {
  constexpr std::int64_t kNear = std::int64_t{1} << 22;
  const auto slope_of = [&](std::int64_t query) { return default_nan(slopes[tile.head[query] * slope_stride]); };
  alignas(64) float slope[kWide] = {}, place[kWide] = {}, distance[kWide] = {};
  for (std::int64_t first = 0; first < tile.inner; first += kWide) {
    const std::int64_t live = std::min<std::int64_t>(kWide, tile.inner - first);
    const std::int64_t* position = tile.inner_position + first;
    bool are_near = true;
    for (std::int64_t i = 0; i < live; ++i) {
      are_near &= std::abs(position[i] - position[0]) <= kNear;
      place[i] = static_cast<float>(position[i] - position[0]);
      if (tile.inner_is_query) slope[i] = slope_of(first + i);
    }
    for (std::int64_t line = 0; line < tile.outer; ++line) {
      if (!tile.inner_is_query) std::fill_n(slope, kWide, slope_of(line));
      const std::int64_t from = tile.outer_position[line] - position[0];
      if (are_near && std::abs(from) <= kNear) {
        const auto near = static_cast<float>(from);
#pragma omp simd
        for (int i = 0; i < kWide; ++i) distance[i] = std::fabs(near - place[i]);
      } else {
        for (std::int64_t i = 0; i < live; ++i) {
          distance[i] = static_cast<float>(std::abs(tile.outer_position[line] - position[i]));
        }
      }
      subtract_products(slope, distance, live, tile.s + line * tile.stride + first);
    }
  }
}

using WordLanes = std::uint32_t[kWide];
using CallLanes = WordLanes[4];

// Philox4x32-10 of 64 counters. Unlike cpu/scores/philox.h it has no arrays, which the compiler does not vectorise (a
// forward with dropout took 1.8 times as long).
inline void philox_lanes(const CallLanes& counter, const std::uint32_t (&key)[2], CallLanes& words) {
#pragma omp simd
  for (int i = 0; i < kWide; ++i) {
    std::uint32_t a = counter[0][i], b = counter[1][i], c = counter[2][i], d = counter[3][i];
    std::uint32_t first = key[0], second = key[1];
    for (int round = 0; round < 10; ++round) {
      const std::uint64_t left = std::uint64_t{0xD2511F53U} * a;
      const std::uint64_t right = std::uint64_t{0xCD9E8D57U} * c;
      a = static_cast<std::uint32_t>(right >> 32) ^ b ^ first;
      b = static_cast<std::uint32_t>(right);
      c = static_cast<std::uint32_t>(left >> 32) ^ d ^ second;
      d = static_cast<std::uint32_t>(left);
      first += 0x9E3779B9U;
      second += 0xBB67AE85U;
    }
    words[0][i] = a;
    words[1][i] = b;
    words[2][i] = c;
    words[3][i] = d;
  }
}

/// The dropout factors of a tile. A call of Philox draws for two rows, 8 apart, and four columns of a 16 x 16 fragment.
/// Words 0 and 2 are those of the first row, 1 and 3 those of the second. Words 0 and 1 have two neighbouring columns,
/// one in each half; words 2 and 3 have the columns 8 further.
class DropoutRun {
 public:
  DropoutRun(const LaneTile& tile, const DropoutLanes& dropout)
      : tile_(tile), dropout_(dropout), keep_(65536.0F / static_cast<float>(dropout.threshold)) {}

  void run() {
    std::fill_n(counter_[3], kWide, dropout_.offset);
    for (std::int64_t first = 0; first < tile_.inner; first += kWide) {
      const std::int64_t live = std::min<std::int64_t>(kWide, tile_.inner - first);
      for (std::int64_t i = 0; i < live; ++i) {
        const auto position = static_cast<std::uint32_t>(tile_.inner_position[first + i]);
        tile_.inner_is_query ? set_row(i, position, first + i) : set_column(i, position);
      }
      for (std::int64_t line = 0; line < tile_.outer; ++line) {
        const auto position = static_cast<std::uint32_t>(tile_.outer_position[line]);
        float* factor = tile_.s + line * tile_.stride + first;
        tile_.inner_is_query ? write_column(position, line == 0, live, factor)
                             : write_row(position, line == 0, plane(line), live, factor);
      }
    }
  }

 private:
  void set_row(std::int64_t i, std::uint32_t row, std::int64_t query) {
    counter_[1][i] = row / 16 * 8 + row % 8;
    counter_[2][i] = plane(query);
    second_[i] = 0 - row / 8 % 2;
  }
  void set_column(std::int64_t i, std::uint32_t column) {
    counter_[0][i] = call_of(column);
    second_[i] = 0 - column / 8 % 2;
    shift_[i] = column % 2 * 16;
  }
  // Lanes are rows; each has its own call, which serves four columns.
  void write_column(std::uint32_t column, bool is_first, std::int64_t live, float* factor) {
    begin_fragment(is_first, column / 16, 0);
    std::fill_n(counter_[0], kWide, call_of(column));
    const CallLanes& words = draw(column % 8 / 2);
    const std::uint32_t word = column / 8 % 2 * 2;
    std::fill_n(shift_, kWide, column % 2 * 16);
    write(words[word], words[word + 1], live, factor);
  }
  // Lanes are columns; each has its own call, which serves two rows.
  void write_row(std::uint32_t row, bool is_first, std::uint32_t plane, std::int64_t live, float* factor) {
    begin_fragment(is_first, row / 16, plane);
    std::fill_n(counter_[1], kWide, row / 16 * 8 + row % 8);
    std::fill_n(counter_[2], kWide, plane);
    const CallLanes& words = draw(row % 8);
    const std::uint32_t word = row / 8 % 2;
    write(words[word], words[word + 2], live, factor);
  }
  // Discards what was drawn for lines of other fragments or planes.
  void begin_fragment(bool is_first, std::uint32_t fragment, std::uint32_t plane) {
    if (is_first || fragment != fragment_ || plane != plane_) std::fill_n(drawn_, 8, false);
    fragment_ = fragment;
    plane_ = plane;
  }
  // Returns the words that lines of a fragment share; draws them the first time.
  const CallLanes& draw(std::uint32_t lines) {
    if (!drawn_[lines]) philox_lanes(counter_, dropout_.key, words_[lines]);
    drawn_[lines] = true;
    return words_[lines];
  }
  void write(const WordLanes& words, const WordLanes& others, std::int64_t live, float* factor) const {
    alignas(64) float found[kWide];
    const std::uint32_t threshold = dropout_.threshold;
    const float keep = keep_;
#pragma omp simd
    for (int i = 0; i < kWide; ++i) {
      const std::uint32_t word = words[i] ^ ((words[i] ^ others[i]) & second_[i]);
      found[i] = (word >> shift_[i] & 0xFFFFU) < threshold ? keep : 0.0F;
    }
    std::copy_n(found, live, factor);
  }

  static std::uint32_t call_of(std::uint32_t column) { return column / 16 * 4 + column % 8 / 2; }
  [[nodiscard]] std::uint32_t plane(std::int64_t query) const {
    return static_cast<std::uint32_t>(tile_.batch * dropout_.heads + tile_.head[query] + tile_.head_offset);
  }

  const LaneTile& tile_;
  const DropoutLanes& dropout_;
  const float keep_;
  std::uint32_t fragment_ = 0, plane_ = 0;
  bool drawn_[8] = {};
  alignas(64) CallLanes counter_ = {};
  alignas(64) CallLanes words_[8];     // for 4 groups of columns, or 8 pairs of rows
  alignas(64) WordLanes second_ = {};  // all ones in lanes that use the second of two words
  alignas(64) WordLanes shift_ = {};
};

void dropout_factors(const LaneTile& tile, const DropoutLanes& dropout) { DropoutRun(tile, dropout).run(); }

}  // namespace HWY_NAMESPACE
}  // namespace tessera::cpu
HWY_AFTER_NAMESPACE();
