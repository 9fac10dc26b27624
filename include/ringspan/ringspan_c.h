/* The C API of ringspan: fixed-width types, no C++ type crosses. Every struct that a caller fills begins with struct_size, set
 * to its sizeof, so that a program built against an older header keeps working: members that it does not know read as zero. */
#ifndef RINGSPAN_RINGSPAN_C_H_
#define RINGSPAN_RINGSPAN_C_H_

#include <stdint.h>

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
  /* Tells the peers; `reason` is a zero-terminated text. */
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

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* RINGSPAN_RINGSPAN_C_H_ */
