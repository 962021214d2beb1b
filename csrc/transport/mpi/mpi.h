// The MPI library of this process, used without its header and without linking to it.
//
// The code that has initialised MPI passes the addresses of its functions and the values of its
// handles and constants (hp_mpi). The visible difference between MPI implementations is the type of
// handles: int in MPICH and Intel MPI, pointers in Open MPI and in the standard ABI. One template,
// instantiated for both, calls each function with the type that it was compiled for. Here and
// above, a handle is an integer that is wide enough for either. The layout of MPI_Status is not
// needed.
//
// Calls throw std::system_error with MPI's error text. One thread at a time may call; if it has to
// be the same thread each time, calls go through a funnel (funnel.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/types.h"
#include "horoplug/horoplug.h"

namespace horoplug {

class Mpi {
 public:
  // A request that MPI has started. `open` until test() reports its end.
  struct Request {
    std::uint64_t handle = 0;
    bool open = false;
  };

  virtual ~Mpi() = default;

  // The memory must stay valid until the request has ended. Ranks are ranks of the job.
  virtual Request send(const void* data, std::size_t bytes, int rank) = 0;
  // Receives a message of at most `bytes` bytes.
  virtual Request receive(void* data, std::size_t bytes, int rank) = 0;
  virtual bool test(Request& request) = 0;
  // Cancels a receive. It ends soon if no message has arrived; test() reports which happened.
  virtual void cancel(Request& request) = 0;

  // MPI's own collectives over all ranks, which must start them in the same order. The functions
  // below say which collectives exist and which reductions they support.
  virtual bool has(OpKind kind) const = 0;
  virtual bool can_reduce(DType dtype, ReduceOp op) const = 0;

  // Parts of a buffer by rank, in bytes. Both arrays must stay valid until the request has ended,
  // too.
  struct Parts {
    const int* sizes;
    const int* begins;
  };

  // In place.
  virtual Request allreduce(void* data, std::size_t elements, DType dtype, ReduceOp op) = 0;
  virtual Request broadcast(void* data, std::size_t bytes, int root) = 0;
  // This rank's part is at its position in the buffer.
  virtual Request allgather(void* data, const Parts& parts) = 0;
  virtual Request alltoall(const void* input, const Parts& sent, void* output,
                           const Parts& received) = 0;
  // `elements`: the number of elements of each rank's part; must stay valid until the request has
  // ended.
  virtual Request reducescatter(const void* input, void* output, const int* elements, DType dtype,
                                ReduceOp op) = 0;
  virtual Request barrier() = 0;

  // The collectives that accept GPU memory in place of the CPU's memory.
  enum class OnGpu : int { kNothing = 0, kMoves, kAll };
  virtual OnGpu on_gpu() const { return OnGpu::kNothing; }
  // The state that must be current during each call from now on. MPI may progress, in any such
  // state, requests that were started in another one.
  class Setting {
   public:
    virtual ~Setting() = default;
    // Whether leave() must be called at the end.
    virtual bool enter() noexcept = 0;
    virtual void leave() noexcept = 0;
  };
  virtual void set(std::shared_ptr<Setting>) {}  // NOLINT(*-value-param): who overrides it keeps it

  // No function may be called after finalisation. As in MPI itself, any thread may ask at any time.
  virtual bool finalized() const = 0;

  // Abandons the open requests to MPI: they are never tested again.
  virtual void close() {}

  // The largest number of elements or bytes that fits the int with which MPI counts.
  static constexpr std::size_t kMostElements = std::size_t{1} << 30;
};

// Throws Error if the description is incomplete.
std::shared_ptr<Mpi> make_mpi(const hp_mpi& description);

}  // namespace horoplug
