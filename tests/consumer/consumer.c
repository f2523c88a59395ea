/* SPDX-License-Identifier: Apache-2.0 */
/* Attention with one key through the C ABI: every output row must be that key's value. */
#include <stdio.h>
#include <tessera/tessera.h>

enum { ROWS = 3, DIM = 8 };

static int failed(int code, const char* where) {
  if (code != TESSERA_OK) fprintf(stderr, "%s: %s\n", where, tessera_last_error());
  return code != TESSERA_OK;
}

static int bind(tessera_bindings* bindings, const char* slot, float* data, int64_t rows) {
  const int64_t shape[4] = {1, rows, 1, DIM};
  tessera_tensor tensor;
  return failed(tessera_tensor_contiguous(&tensor, data, TESSERA_FP32, shape, 4), slot) ||
         failed(tessera_bindings_set(bindings, slot, &tensor), slot);
}

int main(void) {
  float q[ROWS * DIM], k[DIM], v[DIM], o[ROWS * DIM];
  tessera_problem* problem = NULL;
  tessera_plan* plan = NULL;
  tessera_bindings* bindings = NULL;
  tessera_executor* executor = NULL;
  int i, wrong = 0;
  for (i = 0; i < ROWS * DIM; ++i) q[i] = (float)(i % 3);
  for (i = 0; i < DIM; ++i) k[i] = 1.0F, v[i] = (float)i;

  if (failed(tessera_problem_parse("attention sq=3 sk=1 d=8 dtype=fp32", &problem), "parse") ||
      failed(tessera_plan_make(problem, NULL, NULL, &plan), "plan") ||
      failed(tessera_bindings_create(&bindings), "bindings") || bind(bindings, "q", q, ROWS) ||
      bind(bindings, "k", k, 1) || bind(bindings, "v", v, 1) || bind(bindings, "o", o, ROWS) ||
      failed(tessera_executor_create(plan, &executor), "executor") ||
      failed(tessera_executor_run(executor, bindings, NULL), "run")) {
    return 1;
  }
  for (i = 0; i < ROWS * DIM; ++i) wrong += o[i] != v[i % DIM];
  tessera_executor_destroy(executor);
  tessera_bindings_destroy(bindings);
  tessera_plan_destroy(plan);
  tessera_problem_destroy(problem);

  /* A refusal comes back as a code and a text. */
  if (tessera_problem_parse("attention sq=3 colour=blue", &problem) != TESSERA_PARSE) ++wrong;
  printf("tessera %s from C; an error reads \"%s\"\n", tessera_version(), tessera_last_error());
  return wrong != 0;
}
