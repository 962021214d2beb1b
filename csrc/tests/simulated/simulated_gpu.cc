#include "tests/simulated/simulated_gpu.h"

#include "tests/simulated/machine.h"

namespace horoplug::testing {

SimulatedGpu::SimulatedGpu(SimulatedOptions options)
    : machine_(std::make_unique<simulated::Machine>(std::move(options))) {}
SimulatedGpu::~SimulatedGpu() = default;

const cuda::DriverApi& SimulatedGpu::api() const { return machine_->api; }

std::string SimulatedGpu::image(const std::string& kernel) { return "simulated kernel: " + kernel; }

std::shared_ptr<const std::string> SimulatedGpu::code(const std::string& kernel, int) {
  return std::make_shared<std::string>(image(kernel));
}

void SimulatedGpu::fail(const std::string& function, CUresult result) {
  machine_->set_failure(function, result);
}

void SimulatedGpu::lose_device(CUresult result) { machine_->lose_device(result); }

void SimulatedGpu::pause() { machine_->pause(); }
void SimulatedGpu::resume() { machine_->resume(); }

void SimulatedGpu::set_capture_status(CUstream stream, CUstreamCaptureStatus status) {
  machine_->stream(stream)->capture_status.store(status);
}

void SimulatedGpu::on_misuse(std::function<void(const std::string&)> handler) {
  machine_->on_misuse(std::move(handler));
}

std::size_t SimulatedGpu::alive() const { return machine_->alive(); }
std::size_t SimulatedGpu::bytes_used(int device) const { return machine_->memory.used(device); }
int SimulatedGpu::pushed() const { return machine_->pushed.load(); }
std::size_t SimulatedGpu::host_waits() const { return machine_->host_waits.load(); }
std::size_t SimulatedGpu::count(const std::string& what) const { return machine_->count(what); }

}  // namespace horoplug::testing
