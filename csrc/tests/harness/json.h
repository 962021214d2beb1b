// A strict and slow JSON parser for checking what the core writes. It does not support booleans.
#pragma once

#include <cctype>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace horoplug::testing {

struct Json {
  enum class Kind { kNull, kNumber, kString, kArray, kObject };
  Kind kind = Kind::kNull;
  double number = 0;
  std::string text;
  std::vector<Json> items;
  std::map<std::string, Json> fields;

  bool has(const std::string& key) const { return fields.contains(key); }
  const Json& operator[](const std::string& key) const { return fields.at(key); }
};

class JsonParser {
 public:
  // Throws std::runtime_error unless `text` is exactly one JSON value.
  static Json parse(std::string_view text) {
    JsonParser parser(text);
    Json value = parser.value();
    parser.space();
    if (parser.at_ != text.size()) parser.fail("something follows the end");
    return value;
  }

 private:
  explicit JsonParser(std::string_view text) : text_(text) {}

  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error(what + " at " + std::to_string(at_) + " of " +
                             std::to_string(text_.size()) + ": " +
                             std::string(text_.substr(at_ < 40 ? 0 : at_ - 40, 80)));
  }
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  void space() {
    while (at_ < text_.size() && std::string_view(" \n\r\t").find(peek()) != std::string_view::npos)
      ++at_;
  }
  void expect(char c) {
    space();
    if (peek() != c || at_ >= text_.size()) fail(std::string("no ") + c);
    ++at_;
  }

  Json value() {
    space();
    Json json;
    if (peek() == '[' || peek() == '{') {
      const bool array = text_[at_++] == '[';
      json.kind = array ? Json::Kind::kArray : Json::Kind::kObject;
      const char closing = array ? ']' : '}';
      space();
      if (peek() == closing) return ++at_, json;
      while (true) {
        if (array) {
          json.items.push_back(value());
        } else {
          space();
          const std::string key = string();
          expect(':');
          if (!json.fields.emplace(key, value()).second) fail("a key twice: " + key);
        }
        space();
        if (peek() == closing) return ++at_, json;
        expect(',');
      }
    }
    if (peek() == '"') {
      json.kind = Json::Kind::kString;
      json.text = string();
    } else {
      json.kind = Json::Kind::kNumber;
      const std::size_t begin = at_;
      while (std::isdigit(peek()) != 0 ||
             (peek() != '\0' && std::string_view("-.").find(peek()) != std::string_view::npos)) {
        ++at_;
      }
      if (begin == at_) fail("no value");
      json.number = std::stod(std::string(text_.substr(begin, at_ - begin)));
    }
    return json;
  }

  std::string string() {
    if (peek() != '"') fail("no string");
    std::string result;
    for (++at_; peek() != '"'; ++at_) {
      if (at_ >= text_.size()) fail("a string without an end");
      if (static_cast<unsigned char>(peek()) < 0x20) fail("a control character");
      if (peek() == '\\') {
        ++at_;
        if (peek() == 'u') {
          result +=
              static_cast<char>(std::stoi(std::string(text_.substr(at_ + 1, 4)), nullptr, 16));
          at_ += 4;
          continue;
        }
        if (peek() != '"' && peek() != '\\') fail("an unknown escape");
      }
      result += peek();
    }
    ++at_;
    return result;
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace horoplug::testing
