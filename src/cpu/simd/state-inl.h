// SPDX-License-Identifier: Apache-2.0
// Rows of the state of linear attention: decay, rank-one update and the product with q in one pass.
// Included once per instruction set, after matmul-inl.h.
HWY_BEFORE_NAMESPACE();
namespace tessera::cpu {
namespace HWY_NAMESPACE {

HWY_INLINE Vector updated_state(float* s, Vector decay, Vector factor, const float* x) {
  const FloatTag d;
  const Vector value = hn::MulAdd(factor, hn::LoadU(d, x), hn::Mul(decay, hn::LoadU(d, s)));
  hn::StoreU(value, d, s);
  return value;
}

float state_row_dot(std::int64_t n, float decay, float factor, const float* x, const float* y, float* s) {
  const FloatTag d;
  const Vector scale = hn::Set(d, decay);
  const Vector weight = hn::Set(d, factor);
  Vector sum = hn::Zero(d);
  Vector other = hn::Zero(d);  // two chains of additions hide their latency
  std::int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    sum = hn::MulAdd(updated_state(s + i, scale, weight, x + i), hn::LoadU(d, y + i), sum);
    const std::int64_t j = i + kLanes;
    other = hn::MulAdd(updated_state(s + j, scale, weight, x + j), hn::LoadU(d, y + j), other);
  }
  for (; i < n; i += kLanes) {
    sum = hn::MulAdd(updated_state(s + i, scale, weight, x + i), hn::LoadU(d, y + i), sum);
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(sum, other)));
}

void state_row_add(std::int64_t n, float decay, float factor, const float* x, float weight, float* s, float* sum) {
  const FloatTag d;
  const Vector scale = hn::Set(d, decay);
  const Vector of_x = hn::Set(d, factor);
  const Vector of_s = hn::Set(d, weight);
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const Vector value = updated_state(s + i, scale, of_x, x + i);
    hn::StoreU(hn::MulAdd(of_s, value, hn::LoadU(d, sum + i)), d, sum + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera::cpu
HWY_AFTER_NAMESPACE();
