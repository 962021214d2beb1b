#include "tests/simulated/simulated_gpu.h"

#include "tests/simulated/machine.h"

namespace horoplug::testing {

SimulatedCard::SimulatedCard(SimulatedOptions options)
    : machine_(std::make_unique<simulated::Machine>(std::move(options))) {}
SimulatedCard::~SimulatedCard() = default;

const cuda::DriverApi& SimulatedCard::api() const { return machine_->api; }

std::string SimulatedCard::image(const std::string& kernel) {
  return "simulated kernel: " + kernel;
}

std::shared_ptr<const std::string> SimulatedCard::code(const std::string& kernel, int) {
  return std::make_shared<std::string>(image(kernel));
}

void SimulatedCard::fail(const std::string& function, CUresult result) {
  machine_->set_failure(function, result);
}

void SimulatedCard::fall_off(CUresult result) { machine_->fall_off(result); }

void SimulatedCard::hold() { machine_->hold(); }
void SimulatedCard::let_go() { machine_->let_go(); }

void SimulatedCard::set_capture_status(CUstream stream, CUstreamCaptureStatus status) {
  machine_->stream(stream)->capture_status.store(status);
}

void SimulatedCard::on_misuse(std::function<void(const std::string&)> handler) {
  machine_->on_misuse(std::move(handler));
}

std::size_t SimulatedCard::alive() const { return machine_->alive(); }
std::size_t SimulatedCard::bytes_used(int device) const { return machine_->memory.used(device); }
int SimulatedCard::pushed() const { return machine_->pushed.load(); }
std::size_t SimulatedCard::host_waits() const { return machine_->host_waits.load(); }
std::size_t SimulatedCard::count(const std::string& what) const { return machine_->count(what); }

}  // namespace horoplug::testing
