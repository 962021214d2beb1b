#include "transport/mpi/funnel.h"

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <unordered_map>
#include <utility>
#include <vector>

namespace horoplug {
namespace {

// Seconds for which the destructor waits for the thread's current call.
constexpr Seconds kTimeToEnd{0.2};

// One call into MPI. It belongs to the thread until it has ended.
struct MpiCall {
  Mpi::Request request;
  std::exception_ptr error;
  std::atomic<bool> asked{false};  // a caller has asked whether it has ended
  std::atomic<bool> ended{false};

  // Runs `body`, which may leave the request open.
  template <typename Body>
  void attempt(Body&& body) {
    try {
      body();
      if (request.open) return;
    } catch (...) {
      error = std::current_exception();
    }
    ended.store(true, std::memory_order_release);
  }
};

// State used by the worker's functions. If one of them is stuck in MPI, the state outlives the
// funnel.
struct Calls {
  explicit Calls(std::shared_ptr<Mpi> library) : mpi(std::move(library)) {}

  const std::shared_ptr<Mpi> mpi;
  std::vector<std::shared_ptr<MpiCall>> open;  // used by the thread only
  std::atomic<bool> poll_posted{false};
  std::atomic<bool> closed{false};

  void poll() {
    poll_posted.exchange(false);  // later callers of test() post another poll
    bool ended = false;
    std::erase_if(open, [&](const auto& call) {
      if (closed || !call->asked) return false;
      if (!call->ended) call->attempt([&] { mpi->test(call->request); });
      ended |= call->ended;
      return call->ended.load();
    });
    // A caller that spins posts the next poll at once. Yield, since other threads may need the
    // processor.
    if (!ended) ::sched_yield();
  }
};

class Funnel final : public Mpi {
 public:
  Funnel(std::shared_ptr<Mpi> mpi, std::shared_ptr<Worker> worker)
      : calls_(std::make_shared<Calls>(std::move(mpi))), worker_(std::move(worker)) {}
  ~Funnel() override { stop(); }

  Request send(const void* data, std::size_t bytes, int rank) override {
    return begin([=](Mpi& mpi) { return mpi.send(data, bytes, rank); });
  }
  Request receive(void* data, std::size_t bytes, int rank) override {
    return begin([=](Mpi& mpi) { return mpi.receive(data, bytes, rank); });
  }
  Request allreduce(void* data, std::size_t elements, DType dtype, ReduceOp op) override {
    return begin([=](Mpi& mpi) { return mpi.allreduce(data, elements, dtype, op); });
  }
  Request broadcast(void* data, std::size_t bytes, int root) override {
    return begin([=](Mpi& mpi) { return mpi.broadcast(data, bytes, root); });
  }
  Request allgather(void* data, const Parts& parts) override {
    return begin([=](Mpi& mpi) { return mpi.allgather(data, parts); });
  }
  Request alltoall(const void* input, const Parts& sent, void* output,
                   const Parts& received) override {
    return begin([=](Mpi& mpi) { return mpi.alltoall(input, sent, output, received); });
  }
  Request reducescatter(const void* input, void* output, const int* elements, DType dtype,
                        ReduceOp op) override {
    return begin([=](Mpi& mpi) { return mpi.reducescatter(input, output, elements, dtype, op); });
  }
  Request barrier() override {
    return begin([](Mpi& mpi) { return mpi.barrier(); });
  }

  bool test(Request& request) override {
    if (!request.open) return true;
    const auto found = open_calls_.find(request.handle);
    MpiCall& call = *found->second;
    if (!call.ended.load(std::memory_order_acquire)) {
      call.asked = true;
      if (!calls_->poll_posted.exchange(true)) {
        worker_->post([calls = calls_] { calls->poll(); });
      }
      return false;
    }
    const std::shared_ptr<MpiCall> ended = std::move(found->second);
    open_calls_.erase(found);
    request = {};
    if (ended->error) std::rethrow_exception(ended->error);
    return true;
  }
  void cancel(Request& request) override {
    if (!request.open) return;
    worker_->post([calls = calls_, call = open_calls_.at(request.handle)] {
      if (calls->closed || call->ended) return;
      call->attempt([&] { calls->mpi->cancel(call->request); });
    });
  }

  // These functions do not call MPI, or MPI allows them on any thread.
  bool has(OpKind kind) const override { return calls_->mpi->has(kind); }
  bool can_reduce(DType dtype, ReduceOp op) const override {
    return calls_->mpi->can_reduce(dtype, op);
  }
  OnGpu on_gpu() const override { return calls_->mpi->on_gpu(); }
  bool finalized() const override { return calls_->mpi->finalized(); }

  void set(std::shared_ptr<Setting> setting) override {
    worker_->post([calls = calls_, setting] { calls->mpi->set(setting); });
  }

  void close() override { stop(); }

 private:
  // `function` starts a request.
  template <typename Function>
  Request begin(Function function) {
    const auto call = std::make_shared<MpiCall>();
    open_calls_.emplace(++last_, call);
    worker_->post([calls = calls_, call, function] {
      if (calls->closed) return;
      call->attempt([&] { call->request = function(*calls->mpi); });
      if (!call->ended) calls->open.push_back(call);
    });
    return {last_, true};
  }

  void stop() {
    if (calls_->closed.exchange(true)) return;
    worker_->run([calls = calls_] { calls->open.clear(); }, kTimeToEnd);
  }

  const std::shared_ptr<Calls> calls_;
  const std::shared_ptr<Worker> worker_;
  std::unordered_map<std::uint64_t, std::shared_ptr<MpiCall>> open_calls_;  // by handle
  std::uint64_t last_ = 0;
};

}  // namespace

std::shared_ptr<Mpi> make_funnel(std::shared_ptr<Mpi> mpi, std::shared_ptr<Worker> worker) {
  return std::make_shared<Funnel>(std::move(mpi), std::move(worker));
}

}  // namespace horoplug
