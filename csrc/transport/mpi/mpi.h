// The MPI library of this process, without its header and without being linked to it.
//
// Whoever has initialised MPI hands over addresses of functions and values of handles and
// constants (hp_mpi). What differs between MPIs that a caller can see is the type of handles: ints
// in MPICH and Intel MPI, pointers in Open MPI and in the standard ABI. A function is called with
// the very type that it has been compiled for, by one template that is instantiated for both; here
// and above, a handle is a number that is wide enough for either. Nothing needs the layout of an
// MPI_Status.
//
// Calls throw std::system_error with MPI's own text. They are to be made by one thread at a time;
// if that has to be the same one each time, they go through a funnel (funnel.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/types.h"
#include "horoplug/horoplug.h"

namespace horoplug {

class Mpi {
 public:
  // Something that MPI has begun. `open` until test() says that it has ended.
  struct Request {
    std::uint64_t handle = 0;
    bool open = false;
  };

  virtual ~Mpi() = default;

  // The memory must stay until the request has ended. Ranks are those of the job.
  virtual Request send(const void* data, std::size_t bytes, int rank) = 0;
  // A message of at most `bytes` bytes.
  virtual Request receive(void* data, std::size_t bytes, int rank) = 0;
  virtual bool test(Request& request) = 0;
  // It ends soon, if nothing has come; test() tells when.
  virtual void cancel(Request& request) = 0;

  // MPI's own collectives, over all ranks, which begin them in the same order. Which ones there
  // are, and what they can reduce:
  virtual bool has(OpKind kind) const = 0;
  virtual bool can_reduce(DType dtype, ReduceOp op) const = 0;

  // Parts of a buffer by rank, in bytes. The two arrays, too, must stay until the request has
  // ended.
  struct Parts {
    const int* sizes;
    const int* begins;
  };

  // In place.
  virtual Request allreduce(void* data, std::size_t elements, DType dtype, ReduceOp op) = 0;
  virtual Request broadcast(void* data, std::size_t bytes, int root) = 0;
  // This rank's part is in its place.
  virtual Request allgather(void* data, const Parts& parts) = 0;
  virtual Request alltoall(const void* input, const Parts& sent, void* output,
                           const Parts& received) = 0;
  // `elements`: of each rank's part, by rank; must stay until the request has ended.
  virtual Request reducescatter(const void* input, void* output, const int* elements, DType dtype,
                                ReduceOp op) = 0;
  virtual Request barrier() = 0;

  // Which collectives take memory of a GPU in place of the host's.
  enum class OnGpu : int { kNothing = 0, kMoves, kAll };
  virtual OnGpu on_gpu() const { return OnGpu::kNothing; }
  // What holds during each call from now on. Whichever it is, MPI may go on in it with what was
  // begun in another one.
  class Setting {
   public:
    virtual ~Setting() = default;
    // Whether leave() is to be called in the end.
    virtual bool enter() noexcept = 0;
    virtual void leave() noexcept = 0;
  };
  virtual void set(std::shared_ptr<Setting>) {}

  // After that, nothing may be called. As in MPI itself, any thread may ask, at any time.
  virtual bool finalized() const = 0;

  // What is still open is left to MPI: nobody asks for it any more.
  virtual void close() {}

  // More elements than this, or bytes, do not fit into the int with which MPI counts.
  static constexpr std::size_t kMostElements = std::size_t{1} << 30;
};

// Throws Error if the description is incomplete.
std::shared_ptr<Mpi> make_mpi(const hp_mpi& description);

}  // namespace horoplug
