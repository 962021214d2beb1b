// The streams, kernels and working memory of one process set on a GPU. Sets are independent, and
// their operations may come in any order: in a shared stream they would wait for each other.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include "device/cuda/runtime/device.h"
#include "device/cuda/runtime/launcher.h"

namespace horoplug::cuda {

// For the thread that runs the progress loop. Every function throws Error.
class Workspace {
 public:
  explicit Workspace(std::shared_ptr<Device> device);

  Device& device() const { return *device_; }
  Launcher& launcher() { return launcher_; }

  // The stream of all work, and a second one, so that copies to and from the GPU can overlap.
  const Stream& stream() const { return launcher_.stream(); }
  const Stream& back() const { return back_; }
  EventPtr mark() { return device_->mark(stream().handle()); }
  EventPtr mark_back() { return device_->mark(back_.handle()); }
  // Orders later work of one stream behind the present work of the other.
  void order(const Stream& first, const Stream& then) const {
    then.wait_for(device_->mark(first.handle())->handle());
  }

  // Asynchronous copies: from the GPU and within it in stream(), to it in back().
  void fetch(std::byte* to, CUdeviceptr from, std::size_t bytes) const;
  void copy(CUdeviceptr to, CUdeviceptr from, std::size_t bytes) const;
  void bring(CUdeviceptr to, const std::byte* from, std::size_t bytes) const;

  // GPU memory, which work in stream() may use until the next call for the same purpose, and host
  // memory. Aligned to 256 bytes.
  enum class Purpose { kInput, kOutput };
  CUdeviceptr on_device(Purpose purpose, std::size_t bytes);
  std::byte* pinned(Purpose purpose, std::size_t bytes);

  // GPU memory that others than the stream may use, too, until give_back(). If the batch fails
  // before that, the memory and everything it depends on is leaked. Unlike memory that is allocated
  // in stream order, it can be mapped into other processes, as MPI does.
  class Lease {
   public:
    Lease(Workspace& workspace, Purpose purpose, std::size_t bytes)
        : workspace_(workspace), purpose_(purpose), address_(workspace.to_lend(purpose, bytes)) {}
    ~Lease() {
      if (!back_) workspace_.leak(purpose_);
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    CUdeviceptr address() const { return address_; }
    void give_back() { back_ = true; }

   private:
    Workspace& workspace_;
    const Purpose purpose_;
    const CUdeviceptr address_;
    bool back_ = false;
  };

 private:
  CUdeviceptr to_lend(Purpose purpose, std::size_t bytes);
  void leak(Purpose purpose);

  const std::shared_ptr<Device> device_;
  Launcher launcher_;
  const Stream back_;
  std::array<std::unique_ptr<DeviceMemory>, 2> on_device_, lent_;
  std::array<std::unique_ptr<PinnedMemory>, 2> pinned_;
  // Releasing these would wait for the GPU, which may wait for other ranks.
  std::vector<std::unique_ptr<DeviceMemory>> outgrown_on_device_;
  std::vector<std::unique_ptr<PinnedMemory>> outgrown_pinned_;
};

}  // namespace horoplug::cuda
