#include "trace/trace_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "base/status.h"

namespace horoplug {
namespace {

constexpr std::string_view kClosing = "\n]";

}  // namespace

TraceFile::TraceFile(std::string path) : path_(std::move(path)) {
  // O_NONBLOCK: a pipe without a reader is refused instead of waited for.
  fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666);
  if (fd_ < 0) fail(errno);
  struct stat found{};
  const int error = ::fstat(fd_, &found) != 0 ? errno : 0;
  if (error == 0 && S_ISREG(found.st_mode)) return;
  ::close(fd_);
  if (error != 0) fail(error);
  throw Error(HP_INVALID_ARGUMENT,
              "the timeline cannot be written to " + path_ + ": it is not a regular file");
}

TraceFile::~TraceFile() { ::close(fd_); }

void TraceFile::fail(int error) const {
  throw Error(HP_INVALID_ARGUMENT, "the timeline cannot be written to " + path_ + ": " +
                                       std::generic_category().message(error));
}

int TraceFile::write_at(off_t at, std::string_view text) const {
  while (!text.empty()) {
    const ssize_t written = ::pwrite(fd_, text.data(), text.size(), at);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return errno;
    if (written == 0) return ENOSPC;
    at += written;
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  return 0;
}

void TraceFile::begin(std::string_view events) {
  if (::ftruncate(fd_, 0) != 0) fail(errno);
  const std::string text = std::string("[\n").append(events).append(kClosing);
  if (const int error = write_at(0, text); error != 0) fail(error);
  end_ = static_cast<off_t>(text.size() - kClosing.size());
}

void TraceFile::append(std::string_view events) {
  if (events.empty()) return;
  struct stat found{};
  if (::fstat(fd_, &found) != 0) fail(errno);
  if (found.st_size != end_ + static_cast<off_t>(kClosing.size())) {
    throw Error(HP_INVALID_ARGUMENT,
                "the timeline " + path_ + " was changed by somebody else; it ends here");
  }
  const std::string text = std::string(",\n").append(events).append(kClosing);
  if (const int error = write_at(end_, text); error != 0) {
    // These bytes have their place on the disk already.
    if (write_at(end_, kClosing) == 0) {
      static_cast<void>(::ftruncate(fd_, end_ + static_cast<off_t>(kClosing.size())));
    }
    fail(error);
  }
  end_ += static_cast<off_t>(text.size() - kClosing.size());
}

}  // namespace horoplug
