/* Causal attention over 4 ranks (threads) on the caller's memory. With q = 0 and v_j = j, o_i must be i / 2, which is checked. */
#include <pthread.h>
#include <ringspan/ringspan_c.h>
#include <stdio.h>
#include <stdlib.h>

enum { kRanks = 4, kTokens = 512, kHeads = 8, kDim = 64, kRows = kTokens / kRanks, kRow = kHeads * kDim, kSize = kRows * kRow };

static void must(int failed) { failed ? exit(fprintf(stderr, "failed: %s\n", ringspan_last_error())) : (void)0; }

static void* run_rank(void* comm) {
  int32_t rank = 0;
  must(ringspan_comm_rank(comm, &rank));
  float *q = calloc(kSize, 4), *k = calloc(kSize, 4), *v = calloc(kSize, 4), *o = calloc(kSize, 4), *lse = calloc(kRows * kHeads, 4);
  for (int x = 0; x < kSize; ++x) v[x] = (float)(rank * kRows + x / kRow);
  ringspan_problem problem = {sizeof problem, .tokens_q = kTokens, .tokens_k = kTokens, .heads = kHeads, .head_dim = kDim,
                              .ranks = kRanks, .pattern = "causal"};
  ringspan_plan* plan;
  ringspan_attention* attention;
  int64_t bytes;
  must(ringspan_plan_create(&problem, NULL, rank, &plan) || ringspan_plan_arena_bytes(plan, rank, &bytes));
  void* arena = aligned_alloc(64, (size_t)(bytes + 63) / 64 * 64);
  must(ringspan_attention_create_with_plan(plan, comm, NULL, arena, (uint64_t)bytes, &attention));
  ringspan_forward_tensors tensors = {sizeof tensors, {q, 0, kRow, kDim}, {k, 0, kRow, kDim}, {v, 0, kRow, kDim},
                                      {o, 0, kRow, kDim}, {lse, 0, 1, kRows}, NULL, 0, NULL};
  must(ringspan_attention_forward(attention, &tensors));
  for (int x = 0; x < kSize; ++x) must(!(o[x] > v[x] / 2 - 0.01F && o[x] < v[x] / 2 + 0.01F));
  printf("rank %d: %d tokens, arena %lld bytes\n", rank, kRows, (long long)bytes);
  ringspan_attention_destroy(attention), ringspan_plan_destroy(plan), ringspan_comm_destroy(comm);
  return free(q), free(k), free(v), free(o), free(lse), free(arena), NULL;
}

int main(void) {
  ringspan_comm* comms[kRanks];
  pthread_t threads[kRanks];
  must(ringspan_comm_create_threads(kRanks, comms));
  for (int r = 0; r < kRanks; ++r) must(pthread_create(&threads[r], NULL, run_rank, comms[r]));
  for (int r = 0; r < kRanks; ++r) must(pthread_join(threads[r], NULL));
}
