#include "trace/timeline.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/status.h"
#include "trace/json.h"

namespace horoplug {
namespace {

void append_number(std::string& json, std::int64_t value) {
  char digits[24];
  json.append(digits, std::to_chars(digits, digits + sizeof digits, value).ptr);
}

// The format's times are in microseconds.
void append_microseconds(std::string& json, std::int64_t nanoseconds) {
  append_number(json, nanoseconds / 1000);
  const int part = static_cast<int>(nanoseconds % 1000);
  json += '.';
  json += static_cast<char>('0' + part / 100);
  json += static_cast<char>('0' + part / 10 % 10);
  json += static_cast<char>('0' + part % 10);
}

void append_upper(std::string& json, const char* text) {
  for (; *text != '\0'; ++text) {
    json += *text >= 'a' && *text <= 'z' ? static_cast<char>(*text - 'a' + 'A') : *text;
  }
}

}  // namespace

Timeline::Timeline(const std::string& path, Options options, OnFailure on_failure)
    : options_(options), on_failure_(std::move(on_failure)), file_(path) {}

Timeline::~Timeline() { close(); }

void Timeline::begin() {
  using namespace std::chrono;
  origin_ = steady_now();
  started_at_ = duration_cast<microseconds>(system_clock::now().time_since_epoch()).count();
  file_.begin(head());
  closing_ = false;
  thread_ = std::thread([this] { run(); });
}

void Timeline::close() {
  const std::lock_guard only_one(closing_mutex_);
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

TraceRow Timeline::add_row(std::string title, int order) {
  const std::lock_guard lock(mutex_);
  const TraceRow row = ++row_count_;
  if (!closing_) rows_.push_back({row, order, std::move(title)});
  return row;
}

void Timeline::add(TraceEvent event) {
  const std::lock_guard lock(mutex_);
  if (closing_) return;
  if (events_.size() >= options_.max_events) {
    ++dropped_;
  } else {
    events_.push_back(std::move(event));
  }
}

void Timeline::run() {
  std::unique_lock lock(mutex_);
  try {
    while (!closing_) {
      wake_.wait_for(lock, options_.interval, [this] { return closing_; });
      flush(lock);
    }
    flush(lock);  // events that arrived while the last portion was written
    lock.unlock();
    file_.finish();
  } catch (const std::exception& error) {
    if (!lock.owns_lock()) lock.lock();
    closing_ = true;
    events_.clear();
    rows_.clear();
    lock.unlock();
    on_failure_(error.what());
  }
}

void Timeline::flush(std::unique_lock<std::mutex>& lock) {
  writing_.clear();
  writing_.swap(events_);
  const std::vector<Row> rows = std::exchange(rows_, {});
  if (const auto dropped = std::exchange(dropped_, 0); dropped != 0) {
    TraceEvent event;
    event.name = "dropped";
    event.begin = steady_now();
    event.numbers[0] = {"events", static_cast<std::int64_t>(dropped)};
    writing_.push_back(std::move(event));
  }
  lock.unlock();
  for (const Row& row : rows) write(row);
  for (const TraceEvent& event : writing_) write(event);
  file_.flush();
  lock.lock();
}

std::string Timeline::head() const {
  std::string json = R"({"name":"process_name","ph":"M","pid":0,"args":{"name":"horoplug",)"
                     R"("start_time_since_epoch_in_micros":)";
  append_number(json, started_at_);
  return json + "}}";
}

void Timeline::write(const Row& row) {
  json_ = R"({"name":"thread_name","ph":"M","pid":0,"tid":)";
  append_number(json_, row.number);
  json_ += R"(,"args":{"name":)";
  append_json_string(json_, row.title);
  json_ += "}}";
  file_.add(json_);
  if (row.order == 0) return;
  json_ = R"({"name":"thread_sort_index","ph":"M","pid":0,"tid":)";
  append_number(json_, row.number);
  json_ += R"(,"args":{"sort_index":)";
  append_number(json_, row.order);
  json_ += "}}";
  file_.add(json_);
}

std::int64_t Timeline::nanoseconds(SteadyTime time) const {
  return std::max<std::int64_t>(0, std::llround((time - origin_).count() * 1e9));
}

void Timeline::write(const TraceEvent& event) {
  std::string& json = json_;
  const bool span = event.kind == TraceEvent::Kind::kSpan;
  json = R"({"name":")";
  if (event.prefix != nullptr) {
    append_upper(json, event.prefix);
    json += '_';
  }
  append_upper(json, event.name);
  json += span ? R"(","ph":"X","ts":)" : R"(","ph":"i","ts":)";
  const std::int64_t begin = nanoseconds(event.begin);
  append_microseconds(json, begin);
  if (span) {
    json += R"(,"dur":)";
    append_microseconds(json, std::max<std::int64_t>(0, nanoseconds(event.end) - begin));
  } else {
    json += event.row == 0 ? R"(,"s":"p")" : R"(,"s":"t")";
  }
  json += R"(,"pid":0,"tid":)";
  append_number(json, event.row);
  bool any = false;
  const auto key = [&](const char* name) {
    json += std::exchange(any, true) ? "," : R"(,"args":{)";
    json += '"';
    json += name;
    json += "\":";
  };
  for (const TraceEvent::Number& number : event.numbers) {
    if (number.key == nullptr) continue;
    key(number.key);
    append_number(json, number.value);
  }
  if (event.algorithm != nullptr) {
    key("algorithm");
    append_json_string(json, event.algorithm);
  }
  if (event.text.key != nullptr) {
    key(event.text.key);
    append_json_string(json, event.text.value);
  }
  json += any ? "}}" : "}";
  file_.add(json);
}

}  // namespace horoplug
