#include "transport/mpi/mpi.h"

#include <array>
#include <map>
#include <mutex>
#include <string>
#include <system_error>
#include <type_traits>

#include "base/status.h"

namespace horoplug {
namespace {

constexpr int kSuccess = 0;  // in every MPI
constexpr int kTag = 1;      // the engine alone uses the communicator

// Space for an MPI_Status, which is never read: at most 32 bytes in the known MPI libraries.
struct alignas(16) Status {
  std::array<std::byte, 256> bytes;
};

// Formats error codes by MPI's own text.
class Category final : public std::error_category {
 public:
  using ErrorString = int (*)(int, char*, int*);
  explicit Category(ErrorString function) : function_(function) {}
  const char* name() const noexcept override { return "MPI"; }
  std::string message(int code) const override {
    std::array<char, 8192> text{};  // larger than any MPI_MAX_ERROR_STRING
    int length = 0;
    if (function_(code, text.data(), &length) != kSuccess) return "error " + std::to_string(code);
    std::string line(text.data());
    for (char& letter : line) {
      if (letter == '\n') letter = ' ';
    }
    return line;
  }

 private:
  const ErrorString function_;
};

// The category of a library. Thrown errors refer to it at any later time, so it is never destroyed.
const Category& category_of(Category::ErrorString function) {
  static std::mutex mutex;
  static auto* const known = new std::map<Category::ErrorString, Category>;
  std::lock_guard lock(mutex);
  return known->try_emplace(function, function).first->second;
}

template <typename Handle>
class MpiOf final : public Mpi {
 public:
  explicit MpiOf(const hp_mpi& mpi)
      : mpi_(mpi),
        category_(category_of(reinterpret_cast<Category::ErrorString>(mpi.error_string))),
        communicator_(handle(mpi.communicator)),
        byte_(handle(mpi.byte)) {
    copy_handles(mpi.dtypes, mpi.dtype_count, dtypes_);
    copy_handles(mpi.reduce_ops, mpi.reduce_op_count, ops_);
  }

  Request send(const void* data, std::size_t bytes, int rank) override {
    return start<Isend>(mpi_.isend, data, static_cast<int>(bytes), byte_, rank, kTag,
                        communicator_);
  }
  Request receive(void* data, std::size_t bytes, int rank) override {
    return start<Irecv>(mpi_.irecv, data, static_cast<int>(bytes), byte_, rank, kTag,
                        communicator_);
  }
  bool test(Request& request) override {
    if (!request.open) return true;
    Handle open = handle(request.handle);
    int done = 0;
    Status status;
    const int result = call<Test>(mpi_.test, &open, &done, &status);
    request = {number(open), result == kSuccess && done == 0};
    check(result);
    return done != 0;
  }
  void cancel(Request& request) override {
    if (!request.open) return;
    Handle open = handle(request.handle);
    check(call<Cancel>(mpi_.cancel, &open));
    request.handle = number(open);
  }
  bool has(OpKind kind) const override {
    switch (kind) {
      case OpKind::kAllreduce:
        return mpi_.iallreduce != nullptr;
      case OpKind::kBroadcast:
        return mpi_.ibcast != nullptr;
      case OpKind::kAllgather:
        return mpi_.iallgatherv != nullptr;
      case OpKind::kAlltoall:
        return mpi_.ialltoallv != nullptr;
      case OpKind::kReducescatter:
        return mpi_.ireduce_scatter != nullptr;
      case OpKind::kBarrier:
        return mpi_.ibarrier != nullptr;
      default:
        return false;
    }
  }
  bool can_reduce(DType dtype, ReduceOp op) const override {
    return type_of(dtype) != Handle{} && op_of(op) != Handle{};
  }
  Request allreduce(void* data, std::size_t elements, DType dtype, ReduceOp op) override {
    return start<Iallreduce>(mpi_.iallreduce, mpi_.in_place, data, static_cast<int>(elements),
                             type_of(dtype), op_of(op), communicator_);
  }
  Request broadcast(void* data, std::size_t bytes, int root) override {
    return start<Ibcast>(mpi_.ibcast, data, static_cast<int>(bytes), byte_, root, communicator_);
  }
  Request allgather(void* data, const Parts& parts) override {
    return start<Iallgatherv>(mpi_.iallgatherv, mpi_.in_place, 0, byte_, data, parts.sizes,
                              parts.begins, byte_, communicator_);
  }
  Request alltoall(const void* input, const Parts& sent, void* output,
                   const Parts& received) override {
    return start<Ialltoallv>(mpi_.ialltoallv, input, sent.sizes, sent.begins, byte_, output,
                             received.sizes, received.begins, byte_, communicator_);
  }
  Request reducescatter(const void* input, void* output, const int* elements, DType dtype,
                        ReduceOp op) override {
    return start<IreduceScatter>(mpi_.ireduce_scatter, input, output, elements, type_of(dtype),
                                 op_of(op), communicator_);
  }
  Request barrier() override { return start<Ibarrier>(mpi_.ibarrier, communicator_); }
  OnGpu on_gpu() const override { return static_cast<OnGpu>(mpi_.on_gpu); }
  void set(std::shared_ptr<Setting> setting) override { setting_ = std::move(setting); }
  bool finalized() const override {
    int flag = 0;
    return reinterpret_cast<Finalized>(mpi_.finalized)(&flag) != kSuccess || flag != 0;
  }

 private:
  using Isend = int (*)(const void*, int, Handle, int, int, Handle, Handle*);
  using Irecv = int (*)(void*, int, Handle, int, int, Handle, Handle*);
  using Test = int (*)(Handle*, int*, Status*);
  using Cancel = int (*)(Handle*);
  using Finalized = int (*)(int*);
  using Iallreduce = int (*)(const void*, void*, int, Handle, Handle, Handle, Handle*);
  using Ibcast = int (*)(void*, int, Handle, int, Handle, Handle*);
  using Iallgatherv = int (*)(const void*, int, Handle, void*, const int*, const int*, Handle,
                              Handle, Handle*);
  using Ialltoallv = int (*)(const void*, const int*, const int*, Handle, void*, const int*,
                             const int*, Handle, Handle, Handle*);
  using IreduceScatter = int (*)(const void*, void*, const int*, Handle, Handle, Handle, Handle*);
  using Ibarrier = int (*)(Handle, Handle*);

  static Handle handle(std::uint64_t value) {
    if constexpr (std::is_pointer_v<Handle>) {
      return reinterpret_cast<Handle>(static_cast<std::uintptr_t>(value));
    } else {
      return static_cast<Handle>(value);
    }
  }
  static std::uint64_t number(Handle value) {
    if constexpr (std::is_pointer_v<Handle>) {
      return reinterpret_cast<std::uintptr_t>(value);
    } else {
      return static_cast<std::uint64_t>(value);
    }
  }
  // Every call except those that neither ask nor wait for anything.
  template <typename Function, typename... Arguments>
  int call(void* function, Arguments... arguments) const {
    struct Within {
      explicit Within(Setting* setting)
          : to_leave(setting && setting->enter() ? setting : nullptr) {}
      ~Within() {
        if (to_leave != nullptr) to_leave->leave();
      }
      Setting* const to_leave;
    };
    const Within within(setting_.get());
    return reinterpret_cast<Function>(function)(arguments...);
  }
  template <typename Function, typename... Arguments>
  Request start(void* function, Arguments... arguments) const {
    Handle request{};
    check(call<Function>(function, arguments..., &request));
    return {number(request), true};
  }
  Handle type_of(DType dtype) const { return dtypes_[static_cast<std::size_t>(dtype)]; }
  Handle op_of(ReduceOp op) const { return ops_[static_cast<std::size_t>(op)]; }
  void check(int code) const {
    if (code != kSuccess) throw std::system_error(code, category_);
  }

  const hp_mpi mpi_;  // its functions and constants; the arrays were copied
  const Category& category_;
  const Handle communicator_;
  const Handle byte_;
  std::shared_ptr<Setting> setting_;
  // Values that the description does not contain become 0, the null handle here.
  template <std::size_t kCount>
  static void copy_handles(const std::uint64_t* values, std::int32_t count,
                           std::array<Handle, kCount>& handles) {
    for (std::size_t i = 0; i < kCount; ++i) {
      handles[i] = handle(i < static_cast<std::size_t>(count) ? values[i] : 0);
    }
  }

  std::array<Handle, kDTypeCount> dtypes_;
  std::array<Handle, kReduceOpCount> ops_;
};

}  // namespace

std::shared_ptr<Mpi> make_mpi(const hp_mpi& description) {
  for (void* const function :
       {description.isend, description.irecv, description.test, description.cancel,
        description.finalized, description.error_string}) {
    if (function == nullptr)
      throw Error(HP_INVALID_ARGUMENT, "the MPI description lacks a function");
  }
  if (description.on_gpu < HP_MPI_ON_GPU_NOTHING || description.on_gpu > HP_MPI_ON_GPU_ALL) {
    throw Error(HP_INVALID_ARGUMENT,
                "on_gpu of the MPI description is not a value of hp_mpi_on_gpu");
  }
  switch (description.handle_bytes) {
    case sizeof(int):
      return std::make_shared<MpiOf<int>>(description);
    case sizeof(void*):
      return std::make_shared<MpiOf<void*>>(description);
    default:
      throw Error(HP_INVALID_ARGUMENT, "the MPI description has handles of " +
                                           std::to_string(description.handle_bytes) + " bytes");
  }
}

}  // namespace horoplug
