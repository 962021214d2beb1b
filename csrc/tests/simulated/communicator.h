// One rank of a simulated NCCL communicator.
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

// Values of ncclResult_t that nccl.h does not define.
inline constexpr ncclResult_t kUnhandledCudaError = 1;
inline constexpr ncclResult_t kInternalError = 3;
inline constexpr ncclResult_t kInvalidArgument = 4;
inline constexpr ncclResult_t kInvalidUsage = 5;

// State that all communicators of a process share. Enqueued work keeps it alive.
struct NcclShared {
  NcclShared(const GpuInterface& gpu, std::string folder, int which)
      : gpu(gpu), named_memory(std::move(folder)), version(which) {}
  const GpuInterface& gpu;
  NamedMemory named_memory;
  const int version;
  std::atomic<bool> multi_rank{false};  // several ranks may share a GPU
  // Copies of inputs that other ranks may still be reading after an abort.
  std::mutex mutex;
  std::vector<std::unique_ptr<std::byte[]>> abandoned;
};

struct Operation {
  Posted what{};
  const void* send = nullptr;
  void* receive = nullptr;
  // Counts the collectives of the communicator, the sends to the peer, or the recvs from it.
  std::uint32_t number = 0;

  std::size_t element() const;
  int peer() const { return what.root; }
};

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  // For a communicator from split(), init_split() determines `rank` and `ranks`.
  Communicator(std::shared_ptr<NcclShared> shared, std::string name, int rank, int ranks,
               bool blocking);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  const int device;
  const bool blocking;
  int rank, ranks;

  // The result of ncclCommGetAsyncError: ncclInProgress during a non-blocking call.
  ncclResult_t state() const { return state_.load(std::memory_order_acquire); }
  void set_async_error(ncclResult_t error) { state_.store(error, std::memory_order_release); }
  std::string last_error();
  ncclResult_t refuse(const std::string& why, ncclResult_t result);
  // The result of a call that requires the state kNcclSuccess, while the state is another one.
  ncclResult_t not_ready();
  bool is_finalized() const { return mine().finalized.load() != 0; }

  // init(), init_split() and finalize() return when they are done if the communicator is blocking;
  // otherwise a thread does the work.
  ncclResult_t init();
  // Returns the communicator of a color, which the caller initialises; nullptr for
  // NCCL_SPLIT_NOCOLOR.
  std::shared_ptr<Communicator> split(int color, int key, bool part_blocking);
  ncclResult_t init_split();
  ncclResult_t finalize();
  // Waits until the thread is done.
  void join();

  // Validates the arguments of an operation; an error is also stored as the last error.
  ncclResult_t check(const Operation& operation, CUstream stream);
  // Enqueues a group of operations on a stream. `late`: a thread does it after a delay, and the
  // communicator is in progress until then.
  ncclResult_t enqueue(std::vector<Operation> operations, CUstream stream, bool late);

  // Ends all operations, including those that run in streams, before it returns.
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

  // publish() makes a copy that other ranks can read, until withdraw(); fetch() opens such a copy
  // of another rank, until release().
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
  std::atomic<int> running_{0};  // the number of groups that streams are running
  std::atomic<ncclResult_t> state_{cuda::kNcclSuccess};
  std::mutex mutex_;
  std::string last_error_;
  std::thread thread_;

  // For a communicator from split(): its parent until init_split() is done, and the arguments.
  std::shared_ptr<Communicator> parent_;
  std::uint32_t split_ = 0;
  int color_ = 0, key_ = 0;

  // How many of each were enqueued.
  std::uint32_t collectives_ = 0, groups_ = 0, splits_ = 0;
  std::array<std::uint32_t, kMaxRanks> sent_{}, received_{};
  // The number of groups that are done. Groups run one after another, even in different streams.
  Counter turn_{0};
};

}  // namespace horoplug::testing::simulated
