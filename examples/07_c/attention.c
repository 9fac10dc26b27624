/* Causal attention over 4 ranks (threads) on the caller's memory. With q = 0 and v_j = j, o_i must be i / 2, which is checked. */
#include <pthread.h>
#include <ringspan/ringspan_c.h>
#include <stdio.h>
#include <stdlib.h>

enum { kRanks = 4, kTokens = 512, kHeads = 8, kDim = 64, kRows = kTokens / kRanks, kRow = kHeads * kDim, kSize = kRows * kRow };

/* What a rank holds. All zero before it is made, so that it can be given back from wherever something failed. */
typedef struct {
  float *q, *k, *v, *o, *lse;
  void* arena;
  ringspan_plan* plan;
  ringspan_attention* attention;
} Rank;

static int allocate(Rank* r) {
  r->q = calloc(kSize, 4), r->k = calloc(kSize, 4), r->v = calloc(kSize, 4), r->o = calloc(kSize, 4), r->lse = calloc(kRows * kHeads, 4);
  return !r->q || !r->k || !r->v || !r->o || !r->lse;
}

static int attend(Rank* r, ringspan_comm* comm) {
  int32_t rank = 0;
  int64_t bytes = 0;
  if (ringspan_comm_rank(comm, &rank) || allocate(r)) return 1;
  for (int x = 0; x < kSize; ++x) r->v[x] = (float)(rank * kRows + x / kRow);
  ringspan_problem problem = {sizeof problem, .tokens_q = kTokens, .tokens_k = kTokens, .heads = kHeads, .head_dim = kDim,
                              .ranks = kRanks, .pattern = "causal"};
  if (ringspan_plan_create(&problem, NULL, rank, &r->plan) || ringspan_plan_arena_bytes(r->plan, rank, &bytes)) return 1;
  r->arena = aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64);
  if (!r->arena || ringspan_attention_create_with_plan(r->plan, comm, NULL, r->arena, (uint64_t)bytes, &r->attention)) return 1;
  ringspan_forward_tensors tensors = {sizeof tensors, {r->q, 0, kRow, kDim}, {r->k, 0, kRow, kDim}, {r->v, 0, kRow, kDim},
                                      {r->o, 0, kRow, kDim}, {r->lse, 0, 1, kRows}, NULL, 0, NULL};
  if (ringspan_attention_forward(r->attention, &tensors)) return 1;
  for (int x = 0; x < kSize; ++x) {
    if (!(r->o[x] > r->v[x] / 2 - 0.01F && r->o[x] < r->v[x] / 2 + 0.01F)) return 1;
  }
  return printf("rank %d: %d tokens, arena %lld bytes\n", rank, kRows, (long long)bytes) < 0;
}

/* Returns NULL when all went well. */
static void* run_rank(void* comm) {
  Rank r = {0};
  const int failed = attend(&r, comm);
  if (failed) {
    fprintf(stderr, "failed: %s\n", ringspan_last_error());
    ringspan_comm_abort(comm, "a rank gave up"); /* the others must not wait for it */
  }
  ringspan_attention_destroy(r.attention), ringspan_plan_destroy(r.plan), ringspan_comm_destroy(comm); /* all take NULL */
  free(r.q), free(r.k), free(r.v), free(r.o), free(r.lse), free(r.arena); /* the arena outlives the attention */
  return failed ? "failed" : NULL;
}

int main(void) {
  ringspan_comm* comms[kRanks];
  pthread_t threads[kRanks];
  int failed = 0;
  if (ringspan_comm_create_threads(kRanks, comms)) return fprintf(stderr, "failed: %s\n", ringspan_last_error());
  for (int r = 0; r < kRanks; ++r) {
    if (pthread_create(&threads[r], NULL, run_rank, comms[r])) return fprintf(stderr, "no thread for rank %d\n", r);
  }
  for (int r = 0; r < kRanks; ++r) {
    void* result = NULL;
    failed |= pthread_join(threads[r], &result) || result != NULL;
  }
  return failed;
}
