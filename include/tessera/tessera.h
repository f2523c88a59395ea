/* SPDX-License-Identifier: Apache-2.0 */
/* The C ABI: problem, plan, bindings and executor, as in the C++ headers, which document them.
 *
 * - Every function that can fail returns TESSERA_OK (0) or a code; tessera_last_error() then has the text, for the
 *   calling thread, until its next failure. No exception leaves the library.
 * - Handles are opaque, made by a ..._create, _parse or _make and freed by the matching _destroy (NULL is fine there).
 * - Structs begin with struct_size = sizeof(the struct): they can grow, and members that an older caller does not know
 *   are zero.
 * - Functions that give text take a buffer: at most `size` bytes are written, the terminating 0 included, and *needed
 *   (if not NULL) gets the length without it. A short buffer is no error. */
#ifndef TESSERA_TESSERA_H
#define TESSERA_TESSERA_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define TESSERA_API __attribute__((visibility("default")))
#else
#define TESSERA_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum {
  TESSERA_OK = 0,
  TESSERA_INVALID_ARGUMENT = 1, /* a value, shape, dtype, stride, alignment or overlap that is wrong in itself */
  TESSERA_UNSUPPORTED = 2,      /* well formed, but no implementation does it */
  TESSERA_OUT_OF_RANGE = 3,     /* an index, length, page id or list entry outside what it addresses */
  TESSERA_OVERFLOW = 4,         /* a product of sizes does not fit in 64 bits */
  TESSERA_PARSE = 5,            /* text that does not follow its grammar */
  TESSERA_IO = 6,
  TESSERA_INTERNAL = 7, /* a defect in Tessera */
  TESSERA_OUT_OF_MEMORY = 8,
  TESSERA_CANCELLED = 9 /* the function of tessera_bindings_set_interrupt ended the run */
};

enum {
  TESSERA_FP64 = 0,
  TESSERA_FP32 = 1,
  TESSERA_FP16 = 2,
  TESSERA_BF16 = 3,
  TESSERA_E4M3 = 4,
  TESSERA_E5M2 = 5,
  TESSERA_INT8 = 6,
  TESSERA_INT32 = 7,
  TESSERA_INT64 = 8,
  TESSERA_UINT8 = 9,
  TESSERA_UINT32 = 10,
  TESSERA_UINT64 = 11
};

enum { TESSERA_CPU = 0, TESSERA_CUDA = 1 };
enum { TESSERA_TILE_NONE = 0, TESSERA_TILE_PARTIAL = 1, TESSERA_TILE_FULL = 2 };
enum { TESSERA_MAX_RANK = 6 };

typedef struct tessera_problem tessera_problem;
typedef struct tessera_plan tessera_plan;
typedef struct tessera_bindings tessera_bindings;
typedef struct tessera_executor tessera_executor;
typedef struct tessera_skip_state tessera_skip_state;
struct DLTensor; /* of DLPack */

typedef struct tessera_tensor {
  size_t struct_size;
  void* data;
  int64_t byte_offset; /* added to data */
  int32_t dtype;
  int32_t device_type;
  int32_t device_index;
  int32_t rank;
  int64_t shape[TESSERA_MAX_RANK];
  int64_t strides[TESSERA_MAX_RANK]; /* in elements */
} tessera_tensor;

typedef struct tessera_target {
  size_t struct_size;
  int32_t device_type;
  int32_t threads; /* cpu: 0 = what OpenMP would use */
  const char* isa; /* cpu: NULL or "" for the best */
  int32_t sm;      /* cuda: 90 for SM90, which need not be present; 0: that of device_index */
  /* cuda: 0: those of device_index if it has this sm or `emulated` is set; else unknown, and nothing is split */
  int32_t multiprocessors;
  int64_t shared_memory; /* cuda: opt-in bytes per block; 0: the chip's own */
  int32_t emulated;      /* cuda: a plan for another chip, to be run on device_index */
  int32_t device_index;  /* cuda: index of the driver's device; -1: the one whose context is current, or 0 */
} tessera_target;

typedef struct tessera_score_point { /* positions: index + offset */
  int64_t batch, head, query, key;
} tessera_score_point;

typedef struct tessera_tile_bounds { /* positions, ends exclusive */
  int64_t batch, head, query_begin, query_end, key_begin, key_end;
} tessera_tile_bounds;

typedef struct tessera_score_function {
  size_t struct_size;
  double (*value)(double score, const tessera_score_point* at, void* user);
  double (*derivative)(double score, const tessera_score_point* at, void* user); /* NULL without a backward */
  void* user;
} tessera_score_function;

typedef struct tessera_mask_function {
  size_t struct_size;
  int (*visible)(const tessera_score_point* at, void* user);    /* 0: masked */
  int (*classify)(const tessera_tile_bounds* tile, void* user); /* TESSERA_TILE_…; may be NULL */
  void* user;
} tessera_mask_function;

typedef struct tessera_extra { /* a tensor that a text reads as name(i, j) */
  size_t struct_size;
  const char* name; /* a C++ identifier */
  int32_t dtype;    /* TESSERA_FP32, FP16, BF16, INT32, INT64 or UINT8 */
  int32_t rank;     /* 0 to 4 */
} tessera_extra;

typedef struct tessera_skip_head { /* a query head with its own thresholds */
  int64_t head;
  float first, last;
} tessera_skip_head;

typedef struct tessera_skip_options {
  size_t struct_size;
  int64_t steps;     /* steps of a run */
  int64_t warm_up;   /* number of first steps that keep every tile they compute */
  float first, last; /* thresholds of the first and last step: masses, or base-2 logarithms for skip=threshold */
  const tessera_skip_head* heads; /* (head_count); NULL for none */
  size_t head_count;
  const char* layer; /* name of the layer; NULL for "" */
} tessera_skip_options;

typedef struct tessera_token_range { /* keys [begin, end) */
  int64_t begin, end;
} tessera_token_range;

TESSERA_API const char* tessera_version(void);
TESSERA_API int tessera_build_info(char* buffer, size_t size, size_t* needed);
/* Instruction sets that this machine can run, best first, separated by spaces. */
TESSERA_API int tessera_cpu_isas(char* buffer, size_t size, size_t* needed);

/* This thread's last failure: "<argument>: got <got>; want <want>", the argument's name, the code. "" and 0 if there
 * was none. */
TESSERA_API const char* tessera_last_error(void);
TESSERA_API const char* tessera_last_error_argument(void);
TESSERA_API int tessera_last_error_code(void);
/* "invalid argument", … */
TESSERA_API const char* tessera_code_name(int code);

/* A contiguous tensor on the CPU; sets every member. */
TESSERA_API int tessera_tensor_contiguous(tessera_tensor* tensor, void* data, int dtype, const int64_t* shape,
                                          int rank);

/* Registers a score or a mask for CUDA under a name, as C++ text, for the life of the process; tessera/callable.h says
 * what a text may contain. derivative_text: derivative by the score; NULL without a backward. extras: (count), bound as
 * extra0, … ; NULL for none. On the CPU, bind a function for the name. */
TESSERA_API int tessera_register_score(const char* name, const char* text, const char* derivative_text,
                                       const tessera_extra* extras, size_t count);
TESSERA_API int tessera_register_mask(const char* name, const char* text, const tessera_extra* extras, size_t count);

TESSERA_API int tessera_problem_parse(const char* text, tessera_problem** problem);
TESSERA_API int tessera_problem_to_string(const tessera_problem* problem, char* buffer, size_t size, size_t* needed);
TESSERA_API void tessera_problem_destroy(tessera_problem* problem);

/* target: NULL for this machine's CPU. wishes: NULL or text such as "tile_q=64 splits=2". */
TESSERA_API int tessera_plan_make(const tessera_problem* problem, const tessera_target* target, const char* wishes,
                                  tessera_plan** plan);
/* Sets *supported to 1, or to 0 and writes the reason. */
TESSERA_API int tessera_supports(const tessera_problem* problem, const tessera_target* target, const char* wishes,
                                 int* supported, char* reason, size_t size, size_t* needed);
TESSERA_API int tessera_plan_explain(const tessera_plan* plan, char* buffer, size_t size, size_t* needed);
TESSERA_API int tessera_plan_implementation(const tessera_plan* plan, char* buffer, size_t size, size_t* needed);
TESSERA_API int tessera_plan_workspace_bytes(const tessera_plan* plan, size_t* bytes);
TESSERA_API void tessera_plan_destroy(tessera_plan* plan);

TESSERA_API int tessera_bindings_create(tessera_bindings** bindings);
/* slot: "q", "cu_seqlens_q", … as in enum Slot of tessera/executor.h. A NULL tensor unbinds. */
TESSERA_API int tessera_bindings_set(tessera_bindings* bindings, const char* slot, const tessera_tensor* tensor);
TESSERA_API int tessera_bindings_set_dlpack(tessera_bindings* bindings, const char* slot,
                                            const struct DLTensor* tensor);
/* Positions of batch 0 and head 0 for dropout and callables. */
TESSERA_API int tessera_bindings_set_offsets(tessera_bindings* bindings, int64_t batch_offset, int64_t head_offset);
TESSERA_API int tessera_bindings_set_dropout(tessera_bindings* bindings, uint64_t seed, uint64_t offset);
/* NULL: the built-in or registered one that the problem names. */
TESSERA_API int tessera_bindings_set_score(tessera_bindings* bindings, const tessera_score_function* score);
TESSERA_API int tessera_bindings_set_mask(tessera_bindings* bindings, const tessera_mask_function* mask);
/* During a run on the CPU, the thread that runs calls `interrupted` about twenty times a second. A value other than 0
 * ends the run with TESSERA_CANCELLED; the contents of what it writes are then undefined. NULL: no such calls. */
TESSERA_API int tessera_bindings_set_interrupt(tessera_bindings* bindings, int (*interrupted)(void* user), void* user);
TESSERA_API void tessera_bindings_destroy(tessera_bindings* bindings);

/* The executor keeps what it needs of the plan; the plan may be destroyed before it. */
TESSERA_API int tessera_executor_create(const tessera_plan* plan, tessera_executor** executor);
/* workspace: at least tessera_plan_workspace_bytes, 64-byte aligned; stays the caller's. */
TESSERA_API int tessera_executor_create_with_workspace(const tessera_plan* plan, void* workspace, size_t bytes,
                                                       tessera_executor** executor);
/* stream: NULL on the CPU. One call at a time for each executor. */
TESSERA_API int tessera_executor_run(tessera_executor* executor, const tessera_bindings* bindings, void* stream);
TESSERA_API void tessera_executor_destroy(tessera_executor* executor);
/* Decodes a status word that runs with metadata=report on a device have written: the slot's name, "" for no violation,
 * and in *sequence (if not NULL) the sequence that has the violation. */
TESSERA_API int tessera_violation_of(int32_t status, char* slot, size_t size, size_t* needed, int64_t* sequence);

/* A list of tiles that lives across the steps of a diffusion run: tessera/skip_state.h, docs/skip-state.md. */
TESSERA_API int tessera_skip_state_create(const tessera_problem* problem, const tessera_skip_options* options,
                                          tessera_skip_state** state);
/* The same in a GPU's memory. */
TESSERA_API int tessera_skip_state_create_on(const tessera_problem* problem, const tessera_skip_options* options,
                                             int device_index, tessera_skip_state** state);
TESSERA_API int tessera_skip_state_reset(tessera_skip_state* state);
TESSERA_API int tessera_skip_state_reshape(tessera_skip_state* state, const tessera_problem* problem);
TESSERA_API int tessera_skip_state_set_ranges(tessera_skip_state* state, const tessera_token_range* must_do,
                                              size_t must_do_count, const tessera_token_range* must_skip,
                                              size_t must_skip_count);
/* Binds the tensors that the step reads and writes; step 0 resets the state first, on a GPU in the order of the default
 * stream, or of `stream`. The state must outlive the runs with these bindings. */
TESSERA_API int tessera_skip_state_bind(tessera_skip_state* state, int64_t step, tessera_bindings* bindings);
TESSERA_API int tessera_skip_state_bind_on(tessera_skip_state* state, int64_t step, tessera_bindings* bindings,
                                           void* stream);
/* Share of the tiles that the next step computes. */
TESSERA_API int tessera_skip_state_active(const tessera_skip_state* state, double* share);
TESSERA_API int tessera_skip_state_bytes(const tessera_skip_state* state, size_t* bytes);
TESSERA_API int tessera_skip_state_describe(const tessera_skip_state* state, char* buffer, size_t size, size_t* needed);
/* Sets *needed (if not NULL) to the size of the saved state; writes the state only if `size` is not smaller. */
TESSERA_API int tessera_skip_state_save(const tessera_skip_state* state, void* buffer, size_t size, size_t* needed);
TESSERA_API int tessera_skip_state_load(tessera_skip_state* state, const void* saved, size_t bytes);
TESSERA_API void tessera_skip_state_destroy(tessera_skip_state* state);

#ifdef __cplusplus
}
#endif

#endif /* TESSERA_TESSERA_H */
