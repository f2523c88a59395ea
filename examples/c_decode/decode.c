/* SPDX-License-Identifier: Apache-2.0 */
/* Decoding over a paged KV cache through the C ABI, whole: load, plan, fill the cache, then a loop of steps, each of
 * which appends one token a sequence and attends to all of its pages. Every output is held against a plain loop.
 *
 *   cc -std=c99 decode.c $(pkg-config --cflags --libs tessera) -lm -o decode && ./decode FILE.safetensors
 *
 * FILE holds bf16 tensors `layerN.q` (tokens, heads, dim), `layerN.k` and `layerN.v` (tokens, key heads, dim), such as
 * examples/data/gpt/activations.safetensors. The layers 0, 2 and 5 stand for three sequences of a batch, whose prompts
 * have lengths of their own. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tessera/tessera.h>

enum {
  BATCH = 3,
  TOKENS = 1024, /* of each tensor of the file, and the most that a sequence has in the cache */
  HEADS = 6,
  KEY_HEADS = 2,
  DIM = 64,
  PAGE = 16,
  COLUMNS = TOKENS / PAGE, /* of the page table: pages of the longest sequence */
  PAGES = BATCH * COLUMNS,
  STEPS = 96,
  Q_ROW = HEADS * DIM, /* elements of a token */
  KV_ROW = KEY_HEADS * DIM
};

static const int kLayers[BATCH] = {0, 2, 5};
static const int32_t kPrompts[BATCH] = {700, 33, 480};
static const double kTolerance = 1e-2; /* of N(0, 1)-like values in bf16: P is rounded to bf16 before it meets V */

typedef struct sequence { /* what a model computes of a text, bf16 */
  uint16_t *q, *k, *v;
} sequence;

/* Ends the program: an example has nothing to go on with. */
static void check(int code, const char* what) {
  if (code == TESSERA_OK) return;
  fprintf(stderr, "%s: %s\n", what, tessera_last_error());
  exit(1);
}

static void* memory(size_t bytes) {
  void* data = calloc(1, bytes);
  if (data == NULL) {
    fprintf(stderr, "no memory for %zu bytes\n", bytes);
    exit(1);
  }
  return data;
}

/* ---- load ----------------------------------------------------------------------------------------------------------
 */

static char* read_file(const char* path, size_t* size) {
  FILE* file = fopen(path, "rb");
  long length = -1;
  char* data;
  if (file != NULL && fseek(file, 0, SEEK_END) == 0) length = ftell(file);
  if (length < 8) {
    fprintf(stderr, "%s: got no file of 8 bytes or more; want safetensors\n", path);
    exit(1);
  }
  rewind(file);
  data = memory((size_t)length + 1);
  *size = fread(data, 1, (size_t)length, file);
  fclose(file);
  return data;
}

/* A tensor of a safetensors file: 8 bytes of the header's length, the header as JSON, the tensors' bytes. */
static uint16_t* find_tensor(char* file, size_t size, const char* name, size_t elements) {
  uint64_t header = 0, begin = 0, end = 0;
  char key[32];
  const char* at;
  int i;
  for (i = 7; i >= 0; --i) header = header << 8 | (unsigned char)file[i];
  snprintf(key, sizeof key, "\"%s\"", name);
  at = header < size - 8 ? strstr(file + 8, key) : NULL;
  at = at == NULL ? NULL : strstr(at, "\"data_offsets\":[");
  if (at != NULL) {
    begin = strtoull(at + strlen("\"data_offsets\":["), (char**)&at, 10);
    end = strtoull(at + 1, NULL, 10);
  }
  if (end - begin != elements * 2 || end > size - 8 - header) {
    fprintf(stderr, "%s: got %llu bytes; want bf16, %zu elements\n", name, (unsigned long long)(end - begin), elements);
    exit(1);
  }
  return (uint16_t*)(file + 8 + header + begin);
}

static void load(char* file, size_t size, sequence* sequences) {
  int b;
  for (b = 0; b < BATCH; ++b) {
    char name[32];
    snprintf(name, sizeof name, "layer%d.q", kLayers[b]);
    sequences[b].q = find_tensor(file, size, name, (size_t)TOKENS * Q_ROW);
    snprintf(name, sizeof name, "layer%d.k", kLayers[b]);
    sequences[b].k = find_tensor(file, size, name, (size_t)TOKENS * KV_ROW);
    snprintf(name, sizeof name, "layer%d.v", kLayers[b]);
    sequences[b].v = find_tensor(file, size, name, (size_t)TOKENS * KV_ROW);
  }
}

/* ---- plans ---------------------------------------------------------------------------------------------------------
 */

typedef struct run { /* a plan ready to run, with its tensors by name */
  tessera_executor* executor;
  tessera_bindings* bindings;
} run;

/* Problem, plan, executor and empty bindings of a line (docs/grammar.md). The executor allocates its workspace here and
 * nothing later. */
static run make_run(const char* line) {
  tessera_problem* problem = NULL;
  tessera_plan* plan = NULL;
  run made = {NULL, NULL};
  char implementation[64];
  check(tessera_problem_parse(line, &problem), line);
  check(tessera_plan_make(problem, NULL, NULL, &plan), line);
  check(tessera_plan_implementation(plan, implementation, sizeof implementation, NULL), line);
  check(tessera_executor_create(plan, &made.executor), line);
  check(tessera_bindings_create(&made.bindings), line);
  printf("%-24s %s\n", implementation, line);
  tessera_plan_destroy(plan); /* the executor keeps what it needs */
  tessera_problem_destroy(problem);
  return made;
}

static void destroy_run(run* ended) {
  tessera_bindings_destroy(ended->bindings);
  tessera_executor_destroy(ended->executor);
}

static void bind(const run* to, const char* slot, void* data, int dtype, int rank, int64_t a, int64_t b, int64_t c,
                 int64_t d) {
  const int64_t shape[4] = {a, b, c, d};
  tessera_tensor tensor;
  check(tessera_tensor_contiguous(&tensor, data, dtype, shape, rank), slot);
  check(tessera_bindings_set(to->bindings, slot, &tensor), slot);
}

static void execute(const run* ready) { check(tessera_executor_run(ready->executor, ready->bindings, NULL), "run"); }

/* ---- the cache -----------------------------------------------------------------------------------------------------
 */

typedef struct cache {
  uint16_t *k, *v;                /* (PAGES, PAGE, KEY_HEADS, DIM) */
  int32_t table[BATCH * COLUMNS]; /* which pages a sequence has, in order */
  int32_t before[BATCH];          /* tokens there before the step's */
  int32_t used[BATCH];            /* and with them */
} cache;

/* Pages go to sequences as an allocator under load would leave them: in no order. */
static void make_cache(cache* made) {
  uint32_t random = 1;
  int i;
  made->k = memory(sizeof(uint16_t) * PAGES * PAGE * KV_ROW);
  made->v = memory(sizeof(uint16_t) * PAGES * PAGE * KV_ROW);
  for (i = 0; i < PAGES; ++i) made->table[i] = i;
  for (i = PAGES - 1; i > 0; --i) {
    const int other = (int)((random = random * 1664525U + 1013904223U) >> 8) % (i + 1);
    const int32_t page = made->table[i];
    made->table[i] = made->table[other];
    made->table[other] = page;
  }
  for (i = 0; i < BATCH; ++i) made->before[i] = made->used[i] = 0;
}

static void bind_cache(const run* to, cache* source, int32_t* lengths) {
  bind(to, "k", source->k, TESSERA_BF16, 4, PAGES, PAGE, KEY_HEADS, DIM);
  bind(to, "v", source->v, TESSERA_BF16, 4, PAGES, PAGE, KEY_HEADS, DIM);
  bind(to, "page_table", source->table, TESSERA_INT32, 2, BATCH, COLUMNS, 0, 0);
  bind(to, "seqused_k", lengths, TESSERA_INT32, 1, BATCH, 0, 0, 0);
}

/* Puts the prompts, of different lengths, into the cache: packed behind each other, with boundaries. */
static void fill(cache* target, const sequence* sequences) {
  int32_t starts[BATCH + 1] = {0};
  int32_t longest = 0;
  uint16_t *k, *v;
  char line[160];
  run append;
  int b;
  for (b = 0; b < BATCH; ++b) {
    starts[b + 1] = starts[b] + kPrompts[b];
    if (kPrompts[b] > longest) longest = kPrompts[b];
  }
  k = memory(sizeof(uint16_t) * (size_t)starts[BATCH] * KV_ROW);
  v = memory(sizeof(uint16_t) * (size_t)starts[BATCH] * KV_ROW);
  for (b = 0; b < BATCH; ++b) {
    const size_t bytes = sizeof(uint16_t) * (size_t)kPrompts[b] * KV_ROW;
    memcpy(k + (size_t)starts[b] * KV_ROW, sequences[b].k, bytes);
    memcpy(v + (size_t)starts[b] * KV_ROW, sequences[b].v, bytes);
  }
  snprintf(line, sizeof line,
           "kv_append b=%d sq=%d sk=%d hkv=%d dtype=bf16 layout=varlen tq=%d kv=table page=%d pages=%d", BATCH,
           (int)longest, TOKENS, KEY_HEADS, (int)starts[BATCH], PAGE, PAGES);
  append = make_run(line);
  bind_cache(&append, target, target->before);
  bind(&append, "cu_seqlens_q", starts, TESSERA_INT32, 1, BATCH + 1, 0, 0, 0);
  bind(&append, "k_new", k, TESSERA_BF16, 3, starts[BATCH], KEY_HEADS, DIM, 0);
  bind(&append, "v_new", v, TESSERA_BF16, 3, starts[BATCH], KEY_HEADS, DIM, 0);
  execute(&append);
  destroy_run(&append);
  free(k);
  free(v);
  for (b = 0; b < BATCH; ++b) target->before[b] = kPrompts[b];
}

/* ---- the plain loop ------------------------------------------------------------------------------------------------
 */

static double number(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

/* One row of attention from the definition: o = softmax(q kT / sqrt(dim)) v over the sequence's first `used` tokens. */
static void plain_row(const sequence* from, int token, int head, double* row) {
  double scores[TOKENS], largest = -INFINITY, sum = 0;
  const int key_head = head / (HEADS / KEY_HEADS);
  int j, d;
  for (j = 0; j <= token; ++j) {
    const uint16_t* q = from->q + (size_t)token * Q_ROW + head * DIM;
    const uint16_t* k = from->k + (size_t)j * KV_ROW + key_head * DIM;
    scores[j] = 0;
    for (d = 0; d < DIM; ++d) scores[j] += number(q[d]) * number(k[d]);
    scores[j] /= sqrt(DIM);
    if (scores[j] > largest) largest = scores[j];
  }
  for (d = 0; d < DIM; ++d) row[d] = 0;
  for (j = 0; j <= token; ++j) {
    const uint16_t* v = from->v + (size_t)j * KV_ROW + key_head * DIM;
    const double weight = exp(scores[j] - largest);
    sum += weight;
    for (d = 0; d < DIM; ++d) row[d] += weight * number(v[d]);
  }
  for (d = 0; d < DIM; ++d) row[d] /= sum;
}

/* The largest distance between a step's output and the plain loop's. */
static double distance(const sequence* sequences, const cache* source, const float* o) {
  double largest = 0, row[DIM];
  int b, h, d;
  for (b = 0; b < BATCH; ++b) {
    for (h = 0; h < HEADS; ++h) {
      plain_row(&sequences[b], source->before[b], h, row);
      for (d = 0; d < DIM; ++d) {
        const double apart = fabs(o[(b * HEADS + h) * DIM + d] - row[d]);
        if (!(apart <= largest)) largest = apart; /* a NaN counts */
      }
    }
  }
  return largest;
}

/* ---- the loop ------------------------------------------------------------------------------------------------------
 */

int main(int count, char** words) {
#ifdef TESSERA_SOURCE_DIR
  const char* path = count > 1 ? words[1] : TESSERA_SOURCE_DIR "/examples/data/gpt/activations.safetensors";
#else
  const char* path = count > 1 ? words[1] : "activations.safetensors";
#endif
  static cache kv;
  sequence sequences[BATCH];
  uint16_t q[BATCH * Q_ROW], k[BATCH * KV_ROW], v[BATCH * KV_ROW];
  float o[BATCH * Q_ROW];
  double worst = 0;
  size_t size = 0;
  char line[160];
  char* file = read_file(path, &size);
  run append, attend;
  int step, b;

  load(file, size, sequences);
  make_cache(&kv);
  fill(&kv, sequences);

  /* One plan for each of the two calls of a step; it serves every length up to sk. The tensors are bound once: what
   * they hold changes, where they lie does not. */
  snprintf(line, sizeof line, "kv_append b=%d sq=1 sk=%d hkv=%d dtype=bf16 kv=table page=%d pages=%d", BATCH, TOKENS,
           KEY_HEADS, PAGE, PAGES);
  append = make_run(line);
  bind_cache(&append, &kv, kv.before);
  bind(&append, "k_new", k, TESSERA_BF16, 4, BATCH, 1, KEY_HEADS, DIM);
  bind(&append, "v_new", v, TESSERA_BF16, 4, BATCH, 1, KEY_HEADS, DIM);
  snprintf(line, sizeof line,
           "attention b=%d sq=1 sk=%d hq=%d hkv=%d dtype=bf16:bf16:bf16:fp32 kv=table page=%d pages=%d", BATCH, TOKENS,
           HEADS, KEY_HEADS, PAGE, PAGES);
  attend = make_run(line);
  bind_cache(&attend, &kv, kv.used);
  bind(&attend, "q", q, TESSERA_BF16, 4, BATCH, 1, HEADS, DIM);
  bind(&attend, "o", o, TESSERA_FP32, 4, BATCH, 1, HEADS, DIM);

  for (step = 0; step < STEPS; ++step) {
    double apart;
    for (b = 0; b < BATCH; ++b) { /* a model would compute these from the last token */
      const size_t token = (size_t)kv.before[b];
      memcpy(q + b * Q_ROW, sequences[b].q + token * Q_ROW, sizeof(uint16_t) * Q_ROW);
      memcpy(k + b * KV_ROW, sequences[b].k + token * KV_ROW, sizeof(uint16_t) * KV_ROW);
      memcpy(v + b * KV_ROW, sequences[b].v + token * KV_ROW, sizeof(uint16_t) * KV_ROW);
      kv.used[b] = kv.before[b] + 1;
    }
    execute(&append);
    execute(&attend);
    apart = distance(sequences, &kv, o);
    if (!(apart <= worst)) worst = apart;
    for (b = 0; b < BATCH; ++b) kv.before[b] = kv.used[b];
  }

  printf("%d steps of %d sequences, now of %d, %d and %d tokens; largest distance from the plain loop %.1e\n", STEPS,
         BATCH, (int)kv.used[0], (int)kv.used[1], (int)kv.used[2], worst);
  destroy_run(&append);
  destroy_run(&attend);
  free(kv.k);
  free(kv.v);
  free(file);
  return worst <= kTolerance ? 0 : 1;
}
