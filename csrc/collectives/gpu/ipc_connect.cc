// Whether CUDA IPC works is determined by a trial and not derived from the hardware: it depends on
// how GPUs are connected, on the GPUs that a container or CUDA_VISIBLE_DEVICES exposes, and on
// whether a peer is another process. All ranks take each step, and the next one only if it
// succeeded everywhere. The last step uses CUDA IPC.
#include "collectives/gpu/ipc_connect.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include "base/status.h"
#include "collectives/allgather_fixed.h"
#include "collectives/gpu/gpu_group.h"

namespace horoplug {
namespace {

using Purpose = cuda::Workspace::Purpose;

// The value that a rank writes for the others to read, and the time limit for the GPUs.
constexpr std::size_t kTrialBytes = 256;
constexpr auto kPatience = std::chrono::seconds(10);

// Waits until the GPU has reached an event, with a time limit.
class PassedInTime final : public Waitable {
 public:
  explicit PassedInTime(cuda::EventPtr event) : event_(std::move(event)) {}
  bool ready() override { return event_->done() || Clock::now() > until_; }
  void blame(std::vector<int>&) const override {}
  bool polled() const override { return true; }

 private:
  using Clock = std::chrono::steady_clock;
  const cuda::EventPtr event_;
  const Clock::time_point until_ = Clock::now() + kPatience;
};

// Runs a step whose failure becomes this rank's problem.
template <typename Step>
void attempt(std::string& problem, const Step& step) {
  try {
    step();
  } catch (const Error& error) {
    problem = error.what();
  }
}

// Gives all ranks the problem of the first rank that has one.
Task share(Comm& comm, std::string& problem) {
  struct Text {
    char text[240];
  };
  Text mine{};
  std::strncpy(mine.text, problem.c_str(), sizeof mine.text - 1);
  std::vector<Text> all;
  co_await allgather_fixed(comm, mine, all);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    all[rank].text[sizeof mine.text - 1] = '\0';
    if (all[rank].text[0] == '\0') continue;
    problem = "on rank " + std::to_string(rank) + ": " + all[rank].text;
    co_return;
  }
}

std::byte expected(int rank) { return static_cast<std::byte>(rank + 1); }

// Every rank writes to its half and reads the other ranks' halves. Returns the position of the
// result.
const std::byte* begin_trial(const Comm& comm, cuda::Workspace& workspace, cuda::IpcPeers& peers) {
  const cuda::Context& context = workspace.device().context();
  const CUstream stream = workspace.stream().handle();
  {
    const cuda::Current current(context);
    const auto value = static_cast<unsigned char>(expected(comm.rank()));
    context.check(context.api().MemsetD8Async(peers.own_half(), value, kTrialBytes, stream),
                  "cuMemsetD8Async");
  }
  peers.barrier(stream);
  const auto ranks = static_cast<std::size_t>(comm.size());
  std::byte* const seen = workspace.pinned(Purpose::kInput, ranks * kTrialBytes);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    workspace.fetch(seen + rank * kTrialBytes, peers.half(static_cast<int>(rank)), kTrialBytes);
  }
  peers.end_round();
  return seen;
}

void end_trial(const Comm& comm, const cuda::Event& done, const std::byte* seen) {
  if (!done.done()) throw Error(HP_TIMEOUT, "a GPU does not see the signals of other ranks' GPUs");
  for (int rank = 0; rank < comm.size(); ++rank) {
    const bool right = std::all_of(seen, seen + kTrialBytes,
                                   [&](std::byte byte) { return byte == expected(rank); });
    seen += kTrialBytes;
    if (!right) {
      throw Error(HP_ABORTED, "the GPU reads other values from rank " + std::to_string(rank) +
                                  "'s memory than were written there");
    }
  }
}

Task try_out(Comm& comm, cuda::Workspace& workspace, cuda::IpcPeers& peers, std::string& problem) {
  const std::byte* seen = nullptr;
  cuda::EventPtr read;
  attempt(problem, [&] {
    seen = begin_trial(comm, workspace, peers);
    read = workspace.mark();
  });
  co_await share(comm, problem);
  if (!problem.empty()) co_return;
  co_await PassedInTime(read);
  attempt(problem, [&] { end_trial(comm, *read, seen); });
  co_await share(comm, problem);
}

// No stream waits for other ranks any more, and no rank releases memory that another rank has
// mapped.
Task give_up(Comm& comm, cuda::Workspace& workspace, cuda::IpcPeers& peers) {
  peers.release();
  std::string problem;
  cuda::EventPtr last;
  attempt(problem, [&] { last = workspace.mark(); });
  if (last) co_await PassedInTime(last);
  peers.close();
  co_await share(comm, problem);
}

}  // namespace

Task connect_ipc(Comm& comm, cuda::Workspace& workspace, std::unique_ptr<cuda::IpcPeers>& peers,
                 std::string& problem) {
  if (comm.host_memory() == nullptr) {
    problem = "the ranks are not on one host, or have no shared memory there";
    co_return;
  }
  if (comm.size() > cuda::IpcPeers::kMostRanks) {
    problem = "there are more than " + std::to_string(cuda::IpcPeers::kMostRanks) + " ranks";
    co_return;
  }
  std::unique_ptr<cuda::IpcPeers> made;
  cuda::IpcPeers::Offer mine{};
  attempt(problem, [&] {
    made = std::make_unique<cuda::IpcPeers>(workspace.device().shared_from_this(), comm.rank(),
                                            comm.size(), comm.host_memory()->gpus_page());
    mine = made->offer();
  });
  co_await share(comm, problem);
  if (!problem.empty()) co_return;

  std::vector<cuda::IpcPeers::Offer> offers;
  co_await allgather_fixed(comm, mine, offers);
  attempt(problem, [&] { made->open(offers); });
  co_await share(comm, problem);
  if (problem.empty()) co_await try_out(comm, workspace, *made, problem);
  if (!problem.empty()) {
    co_await give_up(comm, workspace, *made);
    co_return;
  }
  if (made->half_bytes() < cuda::IpcPeers::kMostBytes && comm.rank() == 0) {
    workspace.device().log()(LogLevel::kInfo, "GPU tensors are moved by CUDA IPC in chunks of " +
                                                  std::to_string(made->half_bytes() >> 20) +
                                                  " MiB instead of " +
                                                  std::to_string(cuda::IpcPeers::kMostBytes >> 20) +
                                                  ", as a GPU has no more memory left");
  }
  peers = std::move(made);
}

}  // namespace horoplug
