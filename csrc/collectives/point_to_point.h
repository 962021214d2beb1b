// How a tensor gets from one rank to another one: the paths, the choice among them, and the
// transfers themselves.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "base/task.h"
#include "collectives/comm.h"
#include "transport/shm/transfer_slots.h"

namespace horoplug {

struct TransferPath {
  const char* name;    // the value of HOROPLUG_ALGORITHM
  const char* medium;  // as of an Algorithm
};
// All paths.
std::span<const TransferPath> transfer_paths();

inline constexpr TransferPath kCopyPath{"copy", "self"};        // to the rank itself
inline constexpr TransferPath kInlinePath{"inline", "inline"};  // in the message that offers it
inline constexpr TransferPath kDirectPath{"direct", "shm"};     // through slots in shared memory
inline constexpr TransferPath kStreamPath{"stream", "stream"};  // over the links

// The properties of a transfer on which the choice of its path depends.
struct TransferProperties {
  std::size_t bytes = 0;
  bool to_itself = false;
  bool shares_memory = false;  // the two ranks are on one host and map each other's segments
  bool on_gpu = false;         // one of the two tensors, as far as the choosing rank knows
  std::size_t unanswered = 0;  // of a send: the bytes in offers that the peer has not answered
  std::string_view forced{};   // the name of a path to take where it is possible; or empty
};
// The sender chooses kInlinePath (fits_into_offer) or leaves the choice to the receiver, which
// makes it (choose_path) when it has a recv for the tensor.
bool fits_into_offer(const TransferProperties& properties);
const TransferPath& choose_path(const TransferProperties& properties);

// Chunks of a tensor that passes through slots: a tensor of any size is written and read at the
// same time. Both sides compute the same.
std::size_t slot_chunk_bytes(std::size_t bytes);
// The number of slots beyond which a transfer of this size does not become faster.
std::size_t slots_wanted(std::size_t bytes);

// The other rank in a transfer's Comm.
inline constexpr int kTransferPeer = 1;
// What send_stream() queues on the links at a time.
inline constexpr std::size_t kStreamWindow = 16;  // chunks
inline constexpr std::size_t kStreamWindowBytes = kStreamWindow * Comm::kChunkBytes;

Task send_stream(Comm& comm, const std::byte* data, std::size_t bytes);
Task receive_stream(Comm& comm, std::byte* data, std::size_t bytes);
Task send_direct(SlotLoan& loan, const std::byte* data, std::size_t bytes);
Task receive_direct(SlotLoan& loan, std::byte* data, std::size_t bytes);

}  // namespace horoplug
