#include "tests/simulated/communicator.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <tuple>
#include <utility>

namespace horoplug::testing::simulated {

using cuda::kNcclInProgress;
using cuda::kNcclSuccess;

namespace {

constexpr int kNoColor = -1;
// Since this version, NCCL_MULTI_RANK_GPU_ENABLE=1 lets several ranks share a GPU.
constexpr int kMultiRankVersion = 23000;

}  // namespace

Communicator::Communicator(std::shared_ptr<NcclShared> shared, std::string name, int its_rank,
                           int its_ranks, bool is_blocking)
    : device(shared->gpu.current_device()),
      blocking(is_blocking),
      rank(its_rank),
      ranks(its_ranks),
      shared_(std::move(shared)),
      name_(std::move(name)),
      memory_(reinterpret_cast<CommunicatorMemory*>(
          shared_->named_memory.open(name_, sizeof(CommunicatorMemory)))) {}

Communicator::~Communicator() { join(); }

std::string Communicator::last_error() {
  const std::lock_guard lock(mutex_);
  return last_error_;
}

ncclResult_t Communicator::refuse(const std::string& why, ncclResult_t result) {
  const std::lock_guard lock(mutex_);
  last_error_ = why;
  return result;
}

ncclResult_t Communicator::not_ready() {
  const ncclResult_t now = state();
  if (now != kNcclInProgress) return now;
  return refuse("Attempt to use communicator before the previous operation returned ncclSuccess",
                kInvalidArgument);
}

bool Communicator::wait(Counter& counter, std::uint32_t target) const {
  return wait_for(counter, target, [this] {
    return aborted_.load(std::memory_order_relaxed) || shared_->gpu.stopped();
  });
}

void Communicator::abort() {
  aborted_.store(true);
  join();
  while (running_.load() != 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
}

void Communicator::join() {
  if (thread_.joinable()) thread_.join();
}

ncclResult_t Communicator::in_background(std::function<ncclResult_t()> work) {
  join();
  if (blocking) {
    const ncclResult_t result = work();
    set_async_error(result);
    return result;
  }
  set_async_error(kNcclInProgress);
  thread_ = std::thread([this, work = std::move(work)] { set_async_error(work()); });
  return kNcclInProgress;
}

ncclResult_t Communicator::init() {
  const ncclResult_t result = announce();
  if (result == kNcclSuccess) return in_background([this] { return check_ranks(); });
  set_async_error(result);
  return result;
}

ncclResult_t Communicator::announce() {
  CommunicatorMemory::Rank& me = mine();
  if (me.joined.load(std::memory_order_relaxed) != 0) {
    return refuse("two processes or threads are rank " + std::to_string(rank), kInvalidUsage);
  }
  if (shared_->gpu.uuid(&me.uuid, device) != cuda::kSuccess) return kUnhandledCudaError;
  ::gethostname(me.host, sizeof me.host - 1);
  me.ranks = ranks;
  me.version = shared_->version;
  advance_to(me.joined, 1);
  return kNcclSuccess;
}

ncclResult_t Communicator::check_ranks() {
  for (int i = 0; i < ranks; ++i) {
    if (!wait(memory_->ranks[i].joined, 1)) return kInternalError;
  }
  const bool multi_rank = shared_->multi_rank.load() && shared_->version >= kMultiRankVersion;
  for (int i = 0; i < ranks; ++i) {
    const CommunicatorMemory::Rank& one = memory_->ranks[i];
    if (one.ranks != ranks) return refuse("ranks differ in the number of ranks", kInvalidUsage);
    if (one.version != shared_->version) {
      return refuse("Mismatched NCCL version detected : rank " + std::to_string(rank) + " " +
                        std::to_string(shared_->version) + " rank " + std::to_string(i) + " " +
                        std::to_string(one.version),
                    kInvalidUsage);
    }
    for (int j = 0; j < i && !multi_rank; ++j) {
      const CommunicatorMemory::Rank& other = memory_->ranks[j];
      if (std::strcmp(one.host, other.host) != 0 ||
          std::memcmp(&one.uuid, &other.uuid, sizeof one.uuid) != 0) {
        continue;
      }
      return refuse(shared_->version >= kMultiRankVersion
                        ? "Multiple Ranks are using the same GPU/Partition. Set "
                          "NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this configuration."
                        : "Duplicate GPU detected : rank " + std::to_string(j) + " and rank " +
                              std::to_string(i) + " both on CUDA device 1000",
                    kInvalidUsage);
    }
  }
  return kNcclSuccess;
}

std::shared_ptr<Communicator> Communicator::split(int color, int key, bool part_blocking) {
  const std::uint32_t number = ++splits_;
  CommunicatorMemory::Rank& me = mine();
  me.splits[number % std::size(me.splits)] = {color, key};
  advance_to(me.split, number);
  if (color == kNoColor) return nullptr;
  auto part = std::make_shared<Communicator>(
      shared_, name_ + "-s" + std::to_string(number) + "c" + std::to_string(color), 0, 0,
      part_blocking);
  part->parent_ = shared_from_this();
  part->split_ = number;
  part->color_ = color;
  part->key_ = key;
  return part;
}

ncclResult_t Communicator::init_split() {
  return in_background([this] {
    ncclResult_t result = number_ranks();
    if (result == kNcclSuccess) result = announce();
    return result == kNcclSuccess ? check_ranks() : result;
  });
}

ncclResult_t Communicator::number_ranks() {
  const int here = parent_->rank;
  for (int i = 0; i < parent_->ranks; ++i) {
    CommunicatorMemory::Rank& other = parent_->memory_->ranks[i];
    if (!wait(other.split, split_)) return kInternalError;
    const auto& its = other.splits[split_ % std::size(other.splits)];
    if (its.color != color_) continue;
    ++ranks;
    if (std::tuple{its.key, i} < std::tuple{key_, here}) ++rank;
  }
  parent_.reset();
  return kNcclSuccess;
}

ncclResult_t Communicator::finalize() {
  return in_background([this] {
    if (!wait(turn_, groups_)) return kInternalError;
    advance_to(mine().finalized, 1);
    for (int i = 0; i < ranks; ++i) {
      if (!wait(memory_->ranks[i].finalized, 1)) return kInternalError;
    }
    shared_->named_memory.remove(name_);
    return kNcclSuccess;
  });
}

}  // namespace horoplug::testing::simulated
