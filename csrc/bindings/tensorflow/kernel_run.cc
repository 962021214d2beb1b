// One execution of a kernel: from TensorFlow's tensors to the core and back.
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "../common/completion_thread.h"
#include "../common/scoped_handle.h"
#include "deferred_done.h"
#include "submission.h"

namespace horoplug::tensorflow {
namespace {

// Runs `body` and reports its failure to TensorFlow.
template <typename Body>
bool guarded(TF_OpKernelContext* context, Body&& body) {
  return tensorflow::guarded(std::forward<Body>(body), [&](Code code, const char* message) {
    api().OpKernelContext_Failure(context, CallStatus(code, message).get());
  });
}

class KernelRun : private bindings::CompletionThread::Callback {
 public:
  // Reads the inputs and allocates the outputs. Throws Failure.
  KernelRun(const Kernel& kernel, TF_OpKernelContext* context);

  // Runs the operation on this thread. Throws Failure.
  void perform();
  // Starts the operation. When it has ended, the object calls `done` and deletes itself. If this
  // throws, `done` has not been moved from.
  static void start(std::unique_ptr<KernelRun> owned, TF_AsyncOpKernelDoneCallback* done);
  // Sets the output of HorovodDefers: whether start() works for such a kernel.
  void answer(bool defers);

 private:
  void run() noexcept override;
  void add_tensor(int input);
  void read_splits(int input);
  hp_submission submission() const;
  void submit();
  void finish();
  void collect();
  void set_rows(int index);
  void set_counts(int output, const std::int64_t* counts, int size, int ndim = 1);
  void query();
  Tensor input(int index) const;

  const Kernel& kernel_;
  const OpRow& row_;
  TF_OpKernelContext* const context_;
  EngineSlot::Lease lease_;
  CallStatus status_;
  int count_ = 0;  // number of data tensors
  TF_DataType type_ = 0;
  std::vector<Tensor> kept_;  // own the memory that the core reads and writes
  std::vector<std::vector<std::int64_t>> shapes_;
  std::vector<hp_tensor> tensors_;
  std::vector<std::int64_t> splits_;
  hp_handle handle_ = 0;
  DeferredDone done_;
};

KernelRun::KernelRun(const Kernel& kernel, TF_OpKernelContext* context)
    : kernel_(kernel), row_(kernel.row), context_(context), lease_(engine_slot().lease()) {
  if (!lease_ && row_.query != Query::kDefers) throw not_initialized();
  const int inputs = api().NumInputs(context);
  count_ = row_.tensor_count(inputs);
  shapes_.reserve(static_cast<std::size_t>(count_));  // tensors_ points to them
  for (int i = 0; i < count_; ++i) add_tensor(i);
  if (row_.takes_any(kTakesSplits)) read_splits(inputs - 1);
}

Tensor KernelRun::input(int index) const {
  TF_Tensor* tensor = nullptr;
  api().GetInput(context_, index, &tensor, status_.get());
  status_.check();
  return Tensor(tensor);
}

void KernelRun::add_tensor(int index) {
  Tensor tensor = input(index);
  type_ = api().TensorType(tensor.get());
  auto& shape = shapes_.emplace_back();
  for (int i = 0; i < api().NumDims(tensor.get()); ++i) {
    shape.push_back(api().Dim(tensor.get(), i));
  }
  const auto ndim = static_cast<std::int32_t>(shape.size());
  hp_tensor described{api().TensorData(tensor.get()), nullptr, shape.data(), ndim, 0};
  if (row_.output == Output::kLikeInput) {
    // TensorFlow reuses the input's memory for the output if there is no other reference to it. The
    // context keeps the input alive until the kernel has ended.
    tensor.reset();
    int forwarded = -1;
    tensor.reset(api().ForwardInputOrAllocateOutput(context_, &index, 1, index, shape.data(), ndim,
                                                    &forwarded, status_.get()));
    status_.check();
    described.output = api().TensorData(tensor.get());
  }
  kept_.push_back(std::move(tensor));
  tensors_.push_back(described);
}

void KernelRun::read_splits(int index) {
  const Tensor tensor = input(index);
  if (api().NumDims(tensor.get()) != 1) {
    throw Failure(kInvalidArgument, "splits takes one integer for each rank");
  }
  const auto* const values = static_cast<const std::int32_t*>(api().TensorData(tensor.get()));
  splits_.assign(values, values + api().Dim(tensor.get(), 0));
  if (splits_.empty() || shapes_[0].empty()) return;
  // As in Horovod, rows beyond the splits are not sent.
  std::int64_t sum = 0;
  for (const std::int64_t split : splits_) sum += split;
  if (sum >= 0) shapes_[0][0] = std::min(shapes_[0][0], sum);
}

hp_submission KernelRun::submission() const {
  hp_submission submission = submission_of(kernel_, count_ > 0 ? data_type(type_) : 0, tensors_);
  submission.splits = splits_.data();
  submission.split_count = static_cast<std::int32_t>(splits_.size());
  if (row_.op == HP_ALLTOALL && shapes_[0].empty()) {
    throw Failure(kInvalidArgument, "alltoall needs a first dimension to divide");
  }
  return submission;
}

void KernelRun::submit() {
  if (row_.op == HP_JOIN) return check(hp_join(lease_->engine, kernel_.process_set, &handle_));
  const hp_submission made = submission();
  check(engine_slot().prepared().submit(lease_->engine, made, &handle_));
}

void KernelRun::perform() {
  if (row_.query != Query::kNone) return query();
  if (row_.op == HP_JOIN) {
    submit();
    hp_wait(lease_->engine, handle_, -1);
  } else {
    const hp_submission made = submission();
    const hp_status status =
        engine_slot().prepared().perform(lease_->engine, made, -1, false, &handle_);
    if (handle_ == 0) return check(status);
  }
  finish();
}

void KernelRun::finish() {
  hp_engine* const engine = lease_->engine;
  const bindings::ScopedHandle scoped(engine, handle_);
  check(hp_poll(engine, handle_));
  collect();
}

void KernelRun::collect() {
  if (row_.output == Output::kNumber) {
    std::int64_t value = 0;
    check(hp_value(lease_->engine, handle_, &value));
    set_counts(0, &value, 1, 0);
  }
  if (row_.output != Output::kRows && row_.output != Output::kRowsCounted) return;
  for (int i = 0; i < count_; ++i) set_rows(i);
}

void KernelRun::set_rows(int index) {
  hp_tensor_result result{};
  result.struct_size = sizeof result;
  check(hp_result(lease_->engine, handle_, index, &result));
  std::vector<std::int64_t> shape = shapes_[static_cast<std::size_t>(index)];
  if (shape.empty()) shape.push_back(0);
  shape[0] = result.rows;
  const auto ndim = static_cast<int>(shape.size());
  Tensor tensor;
  if (result.owned == 0 || result.bytes == 0) {
    tensor.reset(api().AllocateTensor(type_, shape.data(), ndim, 0));
  } else {
    void* data = nullptr;
    check(hp_take(lease_->engine, handle_, index, &data));
    const Deallocator free_data = [](void* memory, std::size_t, void*) { hp_free(memory); };
    tensor.reset(api().NewTensor(type_, shape.data(), ndim, data,
                                 static_cast<std::size_t>(result.bytes), free_data, nullptr));
  }
  if (!tensor) throw Failure(kInternal, "TensorFlow cannot create the output tensor");
  api().SetOutput(context_, index, tensor.get(), status_.get());
  status_.check();
  if (row_.output == Output::kRowsCounted) {
    set_counts(count_ + index, result.row_counts, result.row_count_size);
  }
}

void KernelRun::set_counts(int output, const std::int64_t* counts, int size, int ndim) {
  const std::int64_t shape = size;
  const bool is_wide = row_.count_type == kInt64;
  const auto bytes = static_cast<std::size_t>(size) * (is_wide ? 8 : 4);
  const Tensor tensor(api().AllocateTensor(row_.count_type, &shape, ndim, bytes));
  if (!tensor) throw Failure(kInternal, "out of memory");
  void* const data = api().TensorData(tensor.get());
  if (is_wide) {
    std::copy_n(counts, size, static_cast<std::int64_t*>(data));
  } else {
    std::copy_n(counts, size, static_cast<std::int32_t*>(data));
  }
  api().SetOutput(context_, output, tensor.get(), status_.get());
  status_.check();
}

void KernelRun::query() {
  const std::int64_t number = query_result(kernel_, lease_);
  set_counts(0, &number, 1, 0);
}

void KernelRun::answer(bool defers) {
  const std::int64_t answer = defers ? 1 : 0;
  set_counts(0, &answer, 1, 0);
}

void KernelRun::start(std::unique_ptr<KernelRun> owned, TF_AsyncOpKernelDoneCallback* done) {
  bindings::completion_thread().start();
  owned->submit();
  // From here on the object owns itself; run() deletes it.
  KernelRun* const run = owned.release();
  run->done_ = DeferredDone(done);
  const hp_done ended = [](void* context) {
    bindings::completion_thread().post(static_cast<KernelRun*>(context));
  };
  hp_on_done(run->lease_->engine, run->handle_, ended, run);
}

void KernelRun::run() noexcept {
  guarded(context_, [this] { finish(); });
  DeferredDone done = std::move(done_);
  delete this;  // releases the engine before TensorFlow continues
  done();
}

}  // namespace

void compute(const Kernel& kernel, TF_OpKernelContext* context) {
  guarded(context, [&] { KernelRun(kernel, context).perform(); });
}

void compute_async(const Kernel& kernel, TF_OpKernelContext* context,
                   TF_AsyncOpKernelDoneCallback* done) {
  const bool can_defer = DeferredDone::can_defer(done);
  if (kernel.row.query == Query::kDefers) {
    guarded(context, [&] { KernelRun(kernel, context).answer(can_defer); });
  } else if (kernel.blocking || !can_defer) {
    compute(kernel, context);
  } else {
    const auto start = [&] {
      KernelRun::start(std::make_unique<KernelRun>(kernel, context), done);
    };
    if (guarded(context, start)) return;
  }
  api().RunAsyncOpKernelDoneCallback(done);
}

}  // namespace horoplug::tensorflow
