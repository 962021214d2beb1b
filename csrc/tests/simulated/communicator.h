// A rank of a simulated communicator.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "device/cuda/driver/nccl.h"
#include "tests/simulated/communicator_memory.h"
#include "tests/simulated/gpu_interface.h"
#include "tests/simulated/named_memory.h"

namespace horoplug::testing::simulated {

// Of ncclResult_t, beyond those of nccl.h.
inline constexpr ncclResult_t kUnhandledCudaError = 1;
inline constexpr ncclResult_t kInternalError = 3;
inline constexpr ncclResult_t kInvalidArgument = 4;
inline constexpr ncclResult_t kInvalidUsage = 5;

// What all communicators of a process have in common. It lives as long as anything that a stream
// has still to do.
struct NcclShared {
  NcclShared(const GpuInterface& gpu, std::string folder, int which)
      : gpu(gpu), named_memory(std::move(folder)), version(which) {}
  const GpuInterface& gpu;
  NamedMemory named_memory;
  const int version;
  std::atomic<bool> multi_rank{false};  // several ranks on one GPU
  // Copies that were given up: others may be reading them.
  std::mutex mutex;
  std::vector<std::unique_ptr<std::byte[]>> abandoned;
};

struct Operation {
  Posted what{};
  const void* send = nullptr;
  void* receive = nullptr;
  std::uint32_t number = 0;  // among those of its kind: collective, or with this peer

  std::size_t element() const;
  int peer() const { return what.root; }
};

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  // Rank and ranks of a part of another one are known when init_split() is done.
  Communicator(std::shared_ptr<NcclShared> shared, std::string name, int rank, int ranks,
               bool blocking);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  const int device;
  const bool blocking;
  int rank, ranks;

  // ncclInProgress while something is done that the caller does not wait for.
  ncclResult_t state() const { return state_.load(std::memory_order_acquire); }
  void set_async_error(ncclResult_t error) { state_.store(error, std::memory_order_release); }
  std::string last_error();
  ncclResult_t refuse(const std::string& why, ncclResult_t result);
  // Of a call while the state is not kNcclSuccess.
  ncclResult_t not_ready();
  bool is_finalized() const { return mine().finalized.load() != 0; }

  // These are done at once if the communicator is blocking, and otherwise by a thread.
  ncclResult_t init();
  // nullptr: of no color. The caller initialises the part.
  std::shared_ptr<Communicator> split(int color, int key, bool part_blocking);
  ncclResult_t init_split();
  ncclResult_t finalize();
  // Waits for what the thread does.
  void join();

  // What is wrong with an operation, which is told; kNcclSuccess: nothing.
  ncclResult_t check(const Operation& operation, CUstream stream);
  // Puts operations into a stream, as one. `late`: by a thread, after a while.
  ncclResult_t enqueue(std::vector<Operation> operations, CUstream stream, bool late);

  // Everything gives up, and nothing is done any more when this returns.
  void abort();

 private:
  struct Group;
  struct Copy {
    std::byte* data = nullptr;
    std::unique_ptr<std::byte[]> owned;
    std::string name;
  };
  ncclResult_t in_background(std::function<ncclResult_t()> work);
  ncclResult_t announce();
  ncclResult_t check_ranks();
  ncclResult_t number_ranks();
  ncclResult_t enqueue_now(std::vector<Operation> operations, CUstream stream);
  void run(const Group& group);
  bool run_all(const Group& group);
  bool run_collective(const Operation& operation);
  bool run_point_to_point(const std::vector<Operation>& operations);
  bool send(const Operation& operation, Copy* copy);
  bool receive(const Operation& operation);
  void compute(const Operation& operation, const std::vector<const std::byte*>& inputs) const;
  void mismatch(const Posted& mine, int other, const Posted& theirs) const;

  // A copy that other ranks can read, and one of theirs.
  Copy publish(const std::string& name, const void* from, std::size_t bytes) const;
  const std::byte* fetch(const std::string& name, const Posted& posted, std::size_t bytes) const;
  void release(const std::string& name) const;
  void withdraw(Copy copy, bool in_use) const;

  bool wait(Counter& counter, std::uint32_t target) const;
  CommunicatorMemory::Rank& mine() const { return memory_->ranks[rank]; }

  std::shared_ptr<NcclShared> shared_;
  std::string name_;
  CommunicatorMemory* memory_;
  std::atomic<bool> aborted_{false};
  std::atomic<int> running_{0};  // groups that streams are at
  std::atomic<ncclResult_t> state_{cuda::kNcclSuccess};
  std::mutex mutex_;
  std::string last_error_;
  std::thread thread_;

  // Of what this is a part.
  std::shared_ptr<Communicator> whole_;
  std::uint32_t split_ = 0;
  int color_ = 0, key_ = 0;

  // Numbers of what has been enqueued.
  std::uint32_t collectives_ = 0, groups_ = 0, splits_ = 0;
  std::array<std::uint32_t, kMaxRanks> sent_{}, received_{};
  Counter turn_{0};  // groups done; they are done one after the other, in whatever streams
};

}  // namespace horoplug::testing::simulated
