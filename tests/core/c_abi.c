/* SPDX-License-Identifier: Apache-2.0 */
/* The header compiles as C11 and a C program can run attention with it. Returns 0, or the line that failed. */
#include <math.h>
#include <string.h>

#include "tessera/tessera.h"

#define EXPECT(condition)              \
  do {                                 \
    if (!(condition)) return __LINE__; \
  } while (0)
#define OK(call) EXPECT((call) == TESSERA_OK)

static double twice(double score, const tessera_score_point* at, void* user) {
  *(int64_t*)user += at->key >= 0;
  return 2.0 * score;
}

static int odd_keys(const tessera_score_point* at, void* user) {
  (void)user;
  return (int)(at->key % 2);
}

static int any_tile(const tessera_tile_bounds* tile, void* user) {
  (void)user;
  return tile->key_end > tile->key_begin ? TESSERA_TILE_PARTIAL : TESSERA_TILE_NONE;
}

int tessera_test_c_program(void);
int tessera_test_c_program(void) {
  float q[2 * 8], k[4 * 8], v[4 * 8], o[2 * 8], want[2 * 8];
  const int64_t q_shape[4] = {1, 2, 1, 8};
  const int64_t k_shape[4] = {1, 4, 1, 8};
  tessera_problem* problem = NULL;
  tessera_plan* plan = NULL;
  tessera_bindings* bindings = NULL;
  tessera_executor* executor = NULL;
  tessera_tensor tensor;
  tessera_score_function score;
  tessera_mask_function mask;
  int64_t calls = 0;
  int i, j, c;

  for (i = 0; i < 16; ++i) q[i] = 0.1F * (float)(i % 5);
  for (i = 0; i < 32; ++i) k[i] = 0.2F * (float)(i % 7);
  for (i = 0; i < 32; ++i) v[i] = (float)(i % 3);

  EXPECT(strcmp(tessera_version(), "") != 0);
  OK(tessera_problem_parse("attention sq=2 sk=4 d=8 score=twice mask=odd scale=1", &problem));
  OK(tessera_plan_make(problem, NULL, NULL, &plan));
  OK(tessera_bindings_create(&bindings));
  OK(tessera_tensor_contiguous(&tensor, q, TESSERA_FP32, q_shape, 4));
  OK(tessera_bindings_set(bindings, "q", &tensor));
  OK(tessera_tensor_contiguous(&tensor, k, TESSERA_FP32, k_shape, 4));
  OK(tessera_bindings_set(bindings, "k", &tensor));
  OK(tessera_tensor_contiguous(&tensor, v, TESSERA_FP32, k_shape, 4));
  OK(tessera_bindings_set(bindings, "v", &tensor));
  OK(tessera_tensor_contiguous(&tensor, o, TESSERA_FP32, q_shape, 4));
  OK(tessera_bindings_set(bindings, "o", &tensor));
  memset(&score, 0, sizeof score);
  score.struct_size = sizeof score;
  score.value = twice;
  score.user = &calls;
  OK(tessera_bindings_set_score(bindings, &score));
  memset(&mask, 0, sizeof mask);
  mask.struct_size = sizeof mask;
  mask.visible = odd_keys;
  mask.classify = any_tile;
  OK(tessera_bindings_set_mask(bindings, &mask));
  OK(tessera_executor_create(plan, &executor));
  tessera_plan_destroy(plan);
  OK(tessera_executor_run(executor, bindings, NULL));
  EXPECT(calls > 0);

  for (i = 0; i < 2; ++i) {
    double sum = 0.0;
    for (c = 0; c < 8; ++c) want[i * 8 + c] = 0.0F;
    for (j = 1; j < 4; j += 2) {
      double s = 0.0;
      for (c = 0; c < 8; ++c) s += (double)q[i * 8 + c] * (double)k[j * 8 + c];
      s = exp(2.0 * s);
      sum += s;
      for (c = 0; c < 8; ++c) want[i * 8 + c] += (float)s * v[j * 8 + c];
    }
    for (c = 0; c < 8; ++c) EXPECT(fabs((double)o[i * 8 + c] - (double)want[i * 8 + c] / sum) < 1e-4);
  }

  tessera_executor_destroy(executor);
  tessera_bindings_destroy(bindings);
  tessera_problem_destroy(problem);
  return 0;
}
