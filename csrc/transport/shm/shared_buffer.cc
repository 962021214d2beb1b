#include "transport/shm/shared_buffer.h"

#include <unistd.h>

namespace horoplug {

SharedBuffer::SharedBuffer(std::uint32_t number, int rank, std::vector<Segment> parts, Fd file,
                           std::size_t place)
    : number_(number),
      rank_(rank),
      parts_(std::move(parts)),
      file_(std::move(file)),
      place_(place),
      owner_(::getpid()) {}

SharedBuffer::~SharedBuffer() {
  // A forked child maps the same memory but does not own it.
  if (file_ && ::getpid() == owner_) Segment::discard(file_, place_, bytes());
}

}  // namespace horoplug
