/* The C API of ringspan: fixed-width types, no C++ type crosses. Structs that may grow begin with struct_size, which the caller
 * sets to their sizeof, so that a program built against an older header keeps working: members that it does not know read as
 * zero. One built against a newer header works with an older library as long as the members that this does not know are zero,
 * else it gets RINGSPAN_UNSUPPORTED instead of something that it did not ask for. Structs without a struct_size never change:
 * ringspan_message, ringspan_peer_traffic, ringspan_memory_line, ringspan_tensor. */
#ifndef RINGSPAN_RINGSPAN_C_H_
#define RINGSPAN_RINGSPAN_C_H_

#include <stdint.h>

/* NOLINTBEGIN(readability-identifier-naming): C names are lower case. */
#ifdef __cplusplus
extern "C" {
#endif

/* ---- Status ------------------------------------------------------------------------------------------------------------ */

/* What a function or callback returns, as int32_t. The values never change. */
enum ringspan_status {
  RINGSPAN_OK = 0,
  RINGSPAN_INVALID_ARGUMENT = 1,
  RINGSPAN_UNSUPPORTED = 2,
  RINGSPAN_COMM_ERROR = 3,
  RINGSPAN_OUT_OF_BUDGET = 4,
  RINGSPAN_DEVICE_ERROR = 5,
  RINGSPAN_ERROR = 6,
  RINGSPAN_INTERNAL_ERROR = 7,
  RINGSPAN_PEER_FAILURE = 8 /* a RINGSPAN_COMM_ERROR that began in another rank */
};

/* ---- Communicator ------------------------------------------------------------------------------------------------------ */

enum ringspan_direction { RINGSPAN_SEND = 0, RINGSPAN_RECEIVE = 1 };

typedef struct ringspan_message {
  int32_t direction; /* enum ringspan_direction */
  int32_t peer;      /* another rank */
  void* data;        /* read only for a send */
  int64_t bytes;     /* > 0 */
} ringspan_message;

/* Payload only. */
typedef struct ringspan_peer_traffic {
  int64_t sent_bytes;
  int64_t received_bytes;
  int64_t sent_messages;
  int64_t received_messages;
} ringspan_peer_traffic;

/* A communicator that an embedder brings. The contract of every callback is that of ringspan::Communicator
 * (ringspan/communicator.h, docs/communicators.md); in short:
 *  - per (source, destination, round) at most one message; both ends use the same round and size;
 *  - post never waits for a peer; a posted buffer belongs to the communicator until wait of its request, or abort, returns,
 *    also where they return an error;
 *  - wait drives progress and fails when a peer shows no sign of life for deadline_seconds (which may be infinite);
 *  - after a failure every call fails.
 * One thread at a time calls the callbacks of one communicator. Callbacks return an enum ringspan_status; anything but
 * RINGSPAN_OK, RINGSPAN_INVALID_ARGUMENT and RINGSPAN_UNSUPPORTED makes the communicator failed for good. */
typedef struct ringspan_communicator {
  uint64_t struct_size; /* sizeof(ringspan_communicator) */
  void* user;           /* passed to every callback */
  int32_t rank;
  int32_t size;

  /* `batch` has `count` messages (0 is allowed) and is valid only during the call. *request: not 0, valid until waited for. */
  int32_t (*post)(void* user, uint64_t round, const ringspan_message* batch, uint64_t count, uint64_t* request);
  /* *complete: 1 when a wait would return at once, else 0. Never blocks. */
  int32_t (*test)(void* user, uint64_t request, int32_t* complete);
  int32_t (*wait)(void* user, uint64_t request, double deadline_seconds);
  int32_t (*progress)(void* user);
  /* Tells the peers, and gives back what was posted; `reason` is a zero-terminated text. Called once at most, also after a
   * callback has failed. */
  void (*abort)(void* user, const char* reason);

  /* The remaining ones may be NULL. */

  /* Collective. Fills *out, whose struct_size the caller has set. NULL: duplicates are refused as unsupported. */
  int32_t (*duplicate)(void* user, struct ringspan_communicator* out);
  /* Writes the text of the last error, zero-terminated and cut to `capacity` bytes, and returns its whole length without the
   * zero. NULL: errors are known by their status only. */
  uint64_t (*error_text)(void* user, char* buffer, uint64_t capacity);
  /* Writes `size` entries: what was moved to and from each peer so far. NULL: ringspan counts what it posts. */
  void (*traffic)(void* user, ringspan_peer_traffic* entries);
  /* Called once, when ringspan needs the communicator no more. */
  void (*destroy)(void* user);
} ringspan_communicator;

/* ---- Conventions of the functions below --------------------------------------------------------------------------------
 *
 * They return an enum ringspan_status; where one failed, ringspan_last_error() is the text until the calling thread calls the
 * next: one that succeeds clears it, ringspan_comm_abort too. The destroy functions leave it. In structs zero (NULL) means the
 * default, so a struct is zeroed, its struct_size set and the rest filled in as needed. Handles are made by a create function
 * and given back by its destroy function, which accepts NULL. A handle is used by one thread at a time; making and destroying
 * different ones at the same time is fine. */

/* "0.1.0", of the library that was linked. */
const char* ringspan_version(void);
/* Of the calling thread's latest call that has a status, "" where it succeeded; valid until the next one. */
const char* ringspan_last_error(void);

/* ---- Problem, options (see ringspan/problem.h, ringspan/plan.h) ---------------------------------------------------------- */

enum ringspan_dtype { RINGSPAN_FLOAT32 = 0, RINGSPAN_BFLOAT16 = 1, RINGSPAN_FLOAT16 = 2 };
enum ringspan_side { RINGSPAN_QUERIES = 0, RINGSPAN_KEYS = 1 };
enum ringspan_pass { RINGSPAN_FORWARD = 0, RINGSPAN_BACKWARD = 1 };

typedef struct ringspan_problem {
  uint64_t struct_size;
  int64_t batch;    /* 0: 1 */
  int64_t tokens_q; /* over all ranks, per batch item */
  int64_t tokens_k; /* 0: no keys; there is no default */
  int32_t heads;
  int32_t kv_heads;     /* 0: heads */
  int32_t head_dim;     /* of q and k */
  int32_t head_dim_v;   /* 0: head_dim */
  int32_t dtype;        /* enum ringspan_dtype */
  int32_t ranks;        /* 0: 1 */
  int32_t replicated_q; /* 1: every rank passes the whole q and receives the whole o */
  int32_t alibi;        /* 1: alibi_slopes are given at execution */
  int32_t sinks;        /* 1: sinks are given at execution */
  float scale;          /* 0: 1 / sqrt(head_dim) */
  float softcap;        /* 0: off; else at least 2^-126, the smallest normal float32 */
  float dropout;
  uint64_t seed;               /* of the dropout */
  const char* pattern;         /* "causal & window:1023,0"; NULL: "full" */
  const char* sharding_q;      /* NULL: "contiguous" */
  const char* sharding_k;      /* NULL: "contiguous", whatever that of q is */
  const int32_t* cu_seqlens_q; /* documents, with their number of entries */
  uint64_t cu_seqlens_q_count;
  const int32_t* cu_seqlens_k; /* NULL: as cu_seqlens_q */
  uint64_t cu_seqlens_k_count;
  const int64_t* lengths_q; /* NULL, or a length per batch item */
  const int64_t* lengths_k; /* NULL: all keys, whatever the lengths of q are */
  const int64_t* starts_k;  /* NULL, or the first key of each batch item */
} ringspan_problem;

typedef struct ringspan_options {
  uint64_t struct_size;
  const char* strategy;     /* NULL: "auto" */
  int64_t bucket_rows;      /* 0: as the planner thinks best; -1: whole chunks */
  int64_t memory_budget;    /* bytes per rank, tensors and arena, without the plan itself; 0: unlimited */
  int32_t computing_ranks;  /* strategy "local" only */
  int32_t threads;          /* of this rank's kernels, at most 4096; 0: 1 */
  int32_t forward_only;     /* 1: plan no backward pass */
  int32_t round_o;          /* 1: backward of 16-bit tensors reads the rounded o instead of one kept in float32 */
  int64_t flops_per_second; /* the cost model of "auto"; 0: its defaults */
  int64_t bytes_per_second;
  int64_t message_nanoseconds;
  const char* attend_kernel; /* NULL: the best that supports the shape */
  const char* attend_backward_kernel;
  int32_t attend_tile_queries; /* tiles of the CPU's kernels; both 0: as tuned on this machine, else the kernel's own */
  int32_t attend_tile_keys;
  int32_t attend_backward_tile_queries;
  int32_t attend_backward_tile_keys;
  /* 1: the caller's tensors lie in pinned host memory and stream through the device in pieces of bucket_rows rows;
   * memory_budget is then of the device's memory. Needs a device, and round_o where 16-bit tensors have a backward pass. */
  int32_t host_tensors;
  int32_t reserved; /* 0 */
  /* Of ringspan_plan_create: "cpu" or "cuda", whose memory is booked; NULL: "cpu". An attention that makes its own plan takes
   * the device of its execute options. */
  const char* device;
  int64_t host_bytes_per_second; /* of the cost model: between tensors on the host and the device; 0: its default */
  /* "storage": a library's fused attention on a device also computes rows that take several of its calls, whose results are
   * rounded to the storage dtype before they are merged, see docs/cuda.md; NULL: "float32". */
  const char* partials;
} ringspan_options;

/* The global positions of a rank's rows, in the order in which it stores them. Writes *rows and, where `capacity` is at least
 * that, `positions`, which may be NULL otherwise. */
int32_t ringspan_shard_positions(const ringspan_problem* problem, int32_t side, int32_t rank, int64_t* positions,
                                 uint64_t capacity, uint64_t* rows);

/* ---- Plan --------------------------------------------------------------------------------------------------------------- */

typedef struct ringspan_plan ringspan_plan;

typedef struct ringspan_memory_line {
  char component[32]; /* q, k, v, ... or buckets, staging, state, gradients, saved, scratch; of a device also task lists, ... */
  int64_t bytes;
  int32_t in_arena; /* otherwise a tensor of the caller's, or beside the arena of a device (task lists, pinned messages) */
  int32_t pinned;   /* 1: host memory of a rank that computes on a device, in no budget */
} ringspan_memory_line;

/* `options` may be NULL. Strings and arrays of both are copied. */
int32_t ringspan_plan_create(const ringspan_problem* problem, const ringspan_options* options, int32_t rank,
                             ringspan_plan** plan);
void ringspan_plan_destroy(ringspan_plan* plan);
/* Of any rank's arena; alignment 64. */
int32_t ringspan_plan_arena_bytes(const ringspan_plan* plan, int32_t rank, int64_t* bytes);
/* Writes *count and, where `capacity` is at least that, the lines. */
int32_t ringspan_plan_memory(const ringspan_plan* plan, int32_t pass, ringspan_memory_line* lines, uint64_t capacity,
                             uint64_t* count);
/* What the pass will move to and from each peer: `capacity` entries, at least as many as ranks. */
int32_t ringspan_plan_traffic(const ringspan_plan* plan, int32_t pass, ringspan_peer_traffic* entries, uint64_t capacity);
/* What the pass copies between tensors on the host and the device, in bytes; 0 without host_tensors. */
int32_t ringspan_plan_host_bytes(const ringspan_plan* plan, int32_t pass, int64_t* to_device, int64_t* to_host);
/* The same by the cost model: nanoseconds of all copies, and of what computing does not hide. */
int32_t ringspan_plan_host_nanoseconds(const ringspan_plan* plan, int32_t pass, int64_t* copies, int64_t* exposed);
int32_t ringspan_plan_fingerprint(const ringspan_plan* plan, uint64_t* fingerprint);
/* The text lives as long as the plan. */
int32_t ringspan_plan_text(ringspan_plan* plan, const char** text);
int32_t ringspan_plan_json(ringspan_plan* plan, const char** json);

/* ---- Ranks -------------------------------------------------------------------------------------------------------------- */

typedef struct ringspan_comm ringspan_comm;

/* `ranks` communicators of ranks that are threads of this process, written to comms[0..ranks); 1 is a world of its own. */
int32_t ringspan_comm_create_threads(int32_t ranks, ringspan_comm** comms);
/* Takes the embedder's communicator over: `destroy` is called when nothing uses it any more (not when this fails). */
int32_t ringspan_comm_create(const ringspan_communicator* callbacks, ringspan_comm** comm);
/* An attention that was made with it keeps it alive. */
void ringspan_comm_destroy(ringspan_comm* comm);
int32_t ringspan_comm_rank(const ringspan_comm* comm, int32_t* rank);
int32_t ringspan_comm_size(const ringspan_comm* comm, int32_t* size);
/* Makes every rank fail at once: `reason` is in their errors. */
int32_t ringspan_comm_abort(ringspan_comm* comm, const char* reason);

/* ---- Devices (see ringspan/device.h) ------------------------------------------------------------------------------------- */

/* Driver, devices and libraries, and what will be used of them and why: one fact per line. Writes the whole length, without the
 * terminating zero, and the text cut to `capacity` bytes; `text` may be NULL. */
int32_t ringspan_device_report(char* text, uint64_t capacity, uint64_t* length);

/* Memory of a device (not "cpu"), and synchronous copies, for programs that have no other way to get it. The copies see what
 * ran on the device before; an attention's work must have ended: ringspan_attention_wait. */
typedef struct ringspan_device_buffer ringspan_device_buffer;

int32_t ringspan_device_buffer_create(const char* device, int64_t bytes, ringspan_device_buffer** buffer);
/* Page-locked host memory, for tensors of host_tensors. */
int32_t ringspan_device_buffer_create_pinned(const char* device, int64_t bytes, ringspan_device_buffer** buffer);
void ringspan_device_buffer_destroy(ringspan_device_buffer* buffer);
/* An address on the device: the host must not follow it, unless the buffer is pinned. */
int32_t ringspan_device_buffer_data(const ringspan_device_buffer* buffer, void** data);
int32_t ringspan_device_buffer_write(ringspan_device_buffer* buffer, const void* source, int64_t bytes, int64_t offset);
int32_t ringspan_device_buffer_read(const ringspan_device_buffer* buffer, void* target, int64_t bytes, int64_t offset);

/* As ringspan_comm_create_threads, with a device per rank by name; several ranks may share one. Messages may lie in memory of
 * the rank's device, and are copied from device to device. */
int32_t ringspan_comm_create_threads_on(const char* const* devices, int32_t ranks, ringspan_comm** comms);

enum { RINGSPAN_NCCL_UNIQUE_ID_BYTES = 128 };

typedef struct ringspan_nccl_options {
  uint64_t struct_size;
  const char* device;      /* of this rank; NULL: "cuda" */
  const char* library;     /* a path; NULL: what RINGSPAN_NCCL_LIBRARY names, else libnccl.so.2 */
  const void* unique_id;   /* 128 bytes, the same on all ranks; NULL: rank 0 makes one and sends it over `host` */
  double deadline_seconds; /* of joining the ranks; 0: 60 */
} ringspan_nccl_options;

/* Collective. Messages in memory of the device go by NCCL, which is loaded at run time, all others over `host`, one made by
 * ringspan_comm_create_threads, which must not be used meanwhile and may be destroyed. An error of one rank is raised on all.
 */
int32_t ringspan_comm_create_nccl(ringspan_comm* host, const ringspan_nccl_options* options, ringspan_comm** comm);

/* ---- Attention (see ringspan/attention.h) ------------------------------------------------------------------------------- */

typedef struct ringspan_attention ringspan_attention;

/* (batch, tokens, heads, dim), strides in elements, the last dimension dense; statistics have dim 1. */
typedef struct ringspan_tensor {
  void* data;
  int64_t batch_stride;
  int64_t token_stride;
  int64_t head_stride;
} ringspan_tensor;

typedef struct ringspan_forward_tensors {
  uint64_t struct_size;
  ringspan_tensor q, k, v; /* read only */
  ringspan_tensor o, lse;
  const float* alibi_slopes; /* (heads), or (batch, heads) with a batch stride */
  int64_t alibi_batch_stride;
  const float* sinks; /* (heads) */
} ringspan_forward_tensors;

typedef struct ringspan_backward_tensors {
  uint64_t struct_size;
  ringspan_tensor q, k, v, o, lse, d_out; /* read only */
  ringspan_tensor dlse;                   /* read only, optional */
  ringspan_tensor dq, dk, dv;
  const float* alibi_slopes;
  int64_t alibi_batch_stride;
  const float* sinks;
  float* dsinks; /* (heads), the sum over all ranks; required with sinks */
} ringspan_backward_tensors;

typedef struct ringspan_execute_options {
  uint64_t struct_size;
  double deadline_seconds; /* of silence from a peer; 0: 30 */
  int32_t trace;           /* 1: record a time line */
  /* 1: on a device a library's fused attention may compute, which may give other bits in every run, see docs/cuda.md. */
  int32_t nondeterministic;
  /* Where it runs: "cpu", "cuda" (the first), "cuda:1", or "cuda-emulated", for tests; NULL: "cpu". Tensors (but see
   * ringspan_options.host_tensors), slopes, sinks, their gradient and a given arena are memory of this device. */
  const char* device;
  /* A stream of the device, used in order with what the caller enqueues there; NULL: one of the attention's own. CUDA's default
   * stream is the handle 0x1, not NULL. */
  void* stream;
  /* Threads of the program's for the rank's kernels, instead of threads of their own: calls run(argument) on up to `threads`
   * (ringspan_options.threads) threads at once, one of which is the calling one, and returns when all calls have returned; must
   * not throw. Fewer calls, or calls one after the other, only take longer; no bit of a result depends on it. With OpenMP:
   *     #pragma omp parallel num_threads(threads)
   *     run(argument);
   * NULL: threads of the library's own. */
  void (*run_on_threads)(void* context, void (*run)(void* argument), void* argument, int32_t threads);
  void* run_on_threads_context;
} ringspan_execute_options;

typedef struct ringspan_pass_stats {
  uint64_t struct_size;
  double seconds;
  double waiting_seconds;
  int64_t sent_bytes;
  int64_t received_bytes;
} ringspan_pass_stats;

/* Collective. Agrees with the other ranks on problem and options, field by field, then plans; the arena is allocated. What is
 * wrong in the arguments of one rank, but for its comm, is raised on all, here and below. */
int32_t ringspan_attention_create(const ringspan_problem* problem, const ringspan_options* options, ringspan_comm* comm,
                                  const ringspan_execute_options* execute, ringspan_attention** attention);
/* Collective. Runs a plan made before, in `arena` (aligned to 64; NULL: allocated here), which must outlive the attention. */
int32_t ringspan_attention_create_with_plan(const ringspan_plan* plan, ringspan_comm* comm,
                                            const ringspan_execute_options* execute, void* arena, uint64_t arena_bytes,
                                            ringspan_attention** attention);
void ringspan_attention_destroy(ringspan_attention* attention);
/* Collective. Tensors that one rank cannot pass (NULL, null data, a wrong struct_size) are refused on all ranks, and the
 * attention stays usable; after any other failure outputs hold nothing of use. What may overlap what: ringspan/attention.h.
 * backward belongs to the latest forward of the attention, which keeps what backward reads: layers that are alike each need an
 * attention of their own. On a device both return when everything is enqueued, see ringspan_attention_wait; an error of the
 * device is noticed by the call that is made then, which may be a later one, and is a RINGSPAN_DEVICE_ERROR. */
int32_t ringspan_attention_forward(ringspan_attention* attention, const ringspan_forward_tensors* tensors);
int32_t ringspan_attention_backward(ringspan_attention* attention, const ringspan_backward_tensors* tensors);
/* Returns when everything that forward and backward enqueued is done; on the CPU, at once. */
int32_t ringspan_attention_wait(ringspan_attention* attention);
/* The seed of dropout in the passes that follow, instead of the problem's; the same on all ranks. */
int32_t ringspan_attention_set_seed(ringspan_attention* attention, uint64_t seed);
/* deadline_seconds of ringspan_execute_options in the passes that follow; positive. */
int32_t ringspan_attention_set_deadline(ringspan_attention* attention, double seconds);
/* Of the latest pass that was not refused; the caller sets stats->struct_size. Members that the library does not know become 0.
 */
int32_t ringspan_attention_stats(const ringspan_attention* attention, int32_t pass, ringspan_pass_stats* stats);
/* The plan that it runs; a new handle. */
int32_t ringspan_attention_plan(const ringspan_attention* attention, ringspan_plan** plan);
/* Chrome trace; valid until the next call of this function or destroy. */
int32_t ringspan_attention_trace(ringspan_attention* attention, const char** json);

#ifdef __cplusplus
} /* extern "C" */
#endif
/* NOLINTEND(readability-identifier-naming) */

#endif /* RINGSPAN_RINGSPAN_C_H_ */
