// One run of a kernel: from TensorFlow's tensors to the core and back.
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "../common/operation.h"
#include "calls.h"
#include "deferred_done.h"

namespace horoplug::tensorflow {
namespace {

// Runs `body`; TensorFlow is told how it failed.
template <typename Body>
bool guarded(TF_OpKernelContext* context, Body&& body) {
  return tensorflow::guarded(std::forward<Body>(body), [&](Code code, const char* message) {
    api().OpKernelContext_Failure(context, CallStatus(code, message).get());
  });
}

class Run : private Job::Task {
 public:
  // Gathers the inputs and makes room for the outputs. Throws Failure.
  Run(const Kernel& kernel, TF_OpKernelContext* context);

  // The whole of it, on this thread. Throws Failure.
  void perform();
  // Starts it; TensorFlow is told by `done` when it has ended. Deletes itself then. Throws before
  // it has taken anything.
  static void start(std::unique_ptr<Run> owned, TF_AsyncOpKernelDoneCallback* done);
  // Answers the question of whether `start` would do for such a kernel.
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
  Job::Loan job_;
  CallStatus status_;
  int count_ = 0;  // of the tensors
  TF_DataType type_ = 0;
  std::vector<Tensor> kept_;  // what the core reads from and writes to
  std::vector<std::vector<std::int64_t>> shapes_;
  std::vector<hp_tensor> tensors_;
  std::vector<std::int64_t> splits_;
  hp_handle handle_ = 0;
  DeferredDone done_;
};

Run::Run(const Kernel& kernel, TF_OpKernelContext* context)
    : kernel_(kernel), row_(kernel.row), context_(context), job_(job().borrow()) {
  if (!job_ && row_.query != Query::kDefers) throw not_initialized();
  const int inputs = api().NumInputs(context);
  count_ = row_.tensors(inputs);
  shapes_.reserve(static_cast<std::size_t>(count_));  // their addresses are handed out
  for (int i = 0; i < count_; ++i) add_tensor(i);
  if (row_.takes_any(kTakesSplits)) read_splits(inputs - 1);
}

Tensor Run::input(int index) const {
  TF_Tensor* tensor = nullptr;
  api().GetInput(context_, index, &tensor, status_.get());
  status_.check();
  return Tensor(tensor);
}

void Run::add_tensor(int index) {
  Tensor tensor = input(index);
  type_ = api().TensorType(tensor.get());
  auto& shape = shapes_.emplace_back();
  for (int i = 0; i < api().NumDims(tensor.get()); ++i) {
    shape.push_back(api().Dim(tensor.get(), i));
  }
  const auto ndim = static_cast<std::int32_t>(shape.size());
  hp_tensor described{api().TensorData(tensor.get()), nullptr, shape.data(), ndim, 0};
  if (row_.output == Output::kLikeInput) {
    // TensorFlow lets the output have the input's memory if nobody else holds it. It keeps the
    // input itself until the kernel has ended.
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

void Run::read_splits(int index) {
  const Tensor tensor = input(index);
  if (api().NumDims(tensor.get()) != 1) {
    throw Failure(kInvalidArgument, "splits takes one integer for each rank");
  }
  const auto* const values = static_cast<const std::int32_t*>(api().TensorData(tensor.get()));
  splits_.assign(values, values + api().Dim(tensor.get(), 0));
  if (splits_.empty() || shapes_[0].empty()) return;
  // As in Horovod, rows beyond the splits are sent nowhere.
  std::int64_t sum = 0;
  for (const std::int64_t split : splits_) sum += split;
  if (sum >= 0) shapes_[0][0] = std::min(shapes_[0][0], sum);
}

hp_submission Run::submission() const {
  hp_submission submission = describe(kernel_, count_ > 0 ? data_type(type_) : 0, tensors_);
  submission.splits = splits_.data();
  submission.split_count = static_cast<std::int32_t>(splits_.size());
  if (row_.op == HP_ALLTOALL && shapes_[0].empty()) {
    throw Failure(kInvalidArgument, "alltoall needs a first dimension to divide");
  }
  return submission;
}

void Run::submit() {
  if (row_.op == HP_JOIN) return check(hp_join(job_->engine, kernel_.process_set, &handle_));
  const hp_submission made = submission();
  check(hp_submit(job_->engine, &made, &handle_));
}

void Run::perform() {
  if (row_.query != Query::kNone) return query();
  if (row_.op == HP_JOIN) {
    submit();
    hp_wait(job_->engine, handle_, -1);
  } else {
    const hp_submission made = submission();
    const hp_status status = hp_perform(job_->engine, &made, -1, &handle_);
    if (handle_ == 0) check(status);
  }
  finish();
}

// The operation has ended.
void Run::finish() {
  hp_engine* const engine = job_->engine;
  const bindings::Release release(engine, handle_);
  check(hp_poll(engine, handle_));
  collect();
}

void Run::collect() {
  if (row_.output == Output::kNumber) {
    std::int64_t value = 0;
    check(hp_value(job_->engine, handle_, &value));
    set_counts(0, &value, 1, 0);
  }
  if (row_.output != Output::kRows && row_.output != Output::kRowsCounted) return;
  for (int i = 0; i < count_; ++i) set_rows(i);
}

void Run::set_rows(int index) {
  hp_tensor_result result{};
  result.struct_size = sizeof result;
  check(hp_result(job_->engine, handle_, index, &result));
  std::vector<std::int64_t> shape = shapes_[static_cast<std::size_t>(index)];
  if (shape.empty()) shape.push_back(0);
  shape[0] = result.rows;
  const auto ndim = static_cast<int>(shape.size());
  Tensor tensor;
  if (result.owned == 0 || result.bytes == 0) {
    tensor.reset(api().AllocateTensor(type_, shape.data(), ndim, 0));
  } else {
    void* data = nullptr;
    check(hp_take(job_->engine, handle_, index, &data));
    const Deallocator free_data = [](void* memory, std::size_t, void*) { hp_free(memory); };
    tensor.reset(api().NewTensor(type_, shape.data(), ndim, data,
                                 static_cast<std::size_t>(result.bytes), free_data, nullptr));
  }
  if (!tensor) throw Failure(kInternal, "TensorFlow does not take the output");
  api().SetOutput(context_, index, tensor.get(), status_.get());
  status_.check();
  if (row_.output == Output::kRowsCounted) {
    set_counts(count_ + index, result.row_counts, result.row_count_size);
  }
}

void Run::set_counts(int output, const std::int64_t* counts, int size, int ndim) {
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

void Run::query() {
  const std::int64_t number = look_up(kernel_, job_);
  set_counts(0, &number, 1, 0);
}

void Run::answer(bool defers) {
  const std::int64_t answer = defers ? 1 : 0;
  set_counts(0, &answer, 1, 0);
}

void Run::start(std::unique_ptr<Run> owned, TF_AsyncOpKernelDoneCallback* done) {
  job().start_thread();
  owned->submit();
  // From here on the run owns itself, until it is called for.
  Run* const run = owned.release();
  run->done_ = DeferredDone(done);
  const hp_done ended = [](void* context) { job().post(static_cast<Run*>(context)); };
  hp_on_done(run->job_->engine, run->handle_, ended, run);
}

void Run::run() noexcept {
  guarded(context_, [this] { finish(); });
  DeferredDone tell = std::move(done_);
  delete this;  // gives the engine back, before TensorFlow does whatever it does now
  tell();
}

}  // namespace

void compute(const Kernel& kernel, TF_OpKernelContext* context) {
  guarded(context, [&] { Run(kernel, context).perform(); });
}

void compute_async(const Kernel& kernel, TF_OpKernelContext* context,
                   TF_AsyncOpKernelDoneCallback* done) {
  const bool can_defer = DeferredDone::can_defer(done);
  if (kernel.row.query == Query::kDefers) {
    guarded(context, [&] { Run(kernel, context).answer(can_defer); });
  } else if (kernel.blocking || !can_defer) {
    compute(kernel, context);
  } else {
    const auto start = [&] { Run::start(std::make_unique<Run>(kernel, context), done); };
    if (guarded(context, start)) return;
  }
  api().RunAsyncOpKernelDoneCallback(done);
}

}  // namespace horoplug::tensorflow
