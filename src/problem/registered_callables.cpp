// SPDX-License-Identifier: Apache-2.0
#include "problem/registered_callables.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <utility>

#include "tessera/error.h"

namespace tessera {
namespace {

[[noreturn]] void refuse(std::string_view argument, std::string got, std::string want) {
  throw Error(ErrorCode::invalid_argument, std::string(argument), std::move(got), std::move(want));
}

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

/// The keywords of C++20, and two names that every text has.
constexpr std::string_view kReserved[] = {"score",
                                          "at",
                                          "alignas",
                                          "alignof",
                                          "and",
                                          "and_eq",
                                          "asm",
                                          "auto",
                                          "bitand",
                                          "bitor",
                                          "bool",
                                          "break",
                                          "case",
                                          "catch",
                                          "char",
                                          "char8_t",
                                          "char16_t",
                                          "char32_t",
                                          "class",
                                          "compl",
                                          "concept",
                                          "const",
                                          "consteval",
                                          "constexpr",
                                          "constinit",
                                          "const_cast",
                                          "continue",
                                          "co_await",
                                          "co_return",
                                          "co_yield",
                                          "decltype",
                                          "default",
                                          "delete",
                                          "do",
                                          "double",
                                          "dynamic_cast",
                                          "else",
                                          "enum",
                                          "explicit",
                                          "export",
                                          "extern",
                                          "false",
                                          "float",
                                          "for",
                                          "friend",
                                          "goto",
                                          "if",
                                          "inline",
                                          "int",
                                          "long",
                                          "mutable",
                                          "namespace",
                                          "new",
                                          "noexcept",
                                          "not",
                                          "not_eq",
                                          "nullptr",
                                          "operator",
                                          "or",
                                          "or_eq",
                                          "private",
                                          "protected",
                                          "public",
                                          "register",
                                          "reinterpret_cast",
                                          "requires",
                                          "return",
                                          "short",
                                          "signed",
                                          "sizeof",
                                          "static",
                                          "static_assert",
                                          "static_cast",
                                          "struct",
                                          "switch",
                                          "template",
                                          "this",
                                          "thread_local",
                                          "throw",
                                          "true",
                                          "try",
                                          "typedef",
                                          "typeid",
                                          "typename",
                                          "union",
                                          "unsigned",
                                          "using",
                                          "virtual",
                                          "void",
                                          "volatile",
                                          "wchar_t",
                                          "while",
                                          "xor",
                                          "xor_eq"};

bool is_identifier(std::string_view name) {
  constexpr std::size_t kLongest = 64;
  if (name.empty() || name.size() > kLongest || is_digit(name[0])) return false;
  if (name.starts_with("__") || name == "extras") return false;
  if (std::find(std::begin(kReserved), std::end(kReserved), name) != std::end(kReserved)) return false;
  return std::all_of(name.begin(), name.end(), [](char c) { return is_letter(c) || is_digit(c); });
}

void check_extras(const std::vector<ExtraTensor>& extras) {
  if (extras.size() > static_cast<std::size_t>(kMaxExtras)) {
    refuse("extras", std::to_string(extras.size()) + " tensors", "at most " + std::to_string(kMaxExtras));
  }
  for (std::size_t i = 0; i < extras.size(); ++i) {
    const ExtraTensor& extra = extras[i];
    if (!is_identifier(extra.name)) {
      refuse("extras", "the name \"" + extra.name + "\"",
             "a C++ identifier, neither a keyword nor score, at or extras");
    }
    for (std::size_t j = 0; j < i; ++j) {
      if (extras[j].name == extra.name) refuse("extras", "\"" + extra.name + "\" twice", "each name once");
    }
    switch (extra.dtype) {
      case DType::fp32:
      case DType::fp16:
      case DType::bf16:
      case DType::int32:
      case DType::int64:
      case DType::uint8:
        break;
      default:
        refuse("extras", extra.name + " in " + std::string(to_string(extra.dtype)),
               "fp32, fp16, bf16, int32, int64 or uint8");
    }
    if (extra.rank < 0 || extra.rank > 4) {
      refuse("extras", extra.name + " with " + std::to_string(extra.rank) + " dimensions", "0 to 4");
    }
  }
}

void check_text(std::string_view argument, const std::string& text) {
  if (text.find_first_not_of(" \t\r\n") == std::string::npos) refuse(argument, "nothing", "C++ text");
  if (text.find('\0') != std::string::npos) refuse(argument, "a zero byte in it", "C++ text");
}

template <class Text>
struct Entry {
  Text text;
  std::optional<detail::Expression> program;
};

/// The texts of one kind. Entries are never changed or removed, so pointers to them stay valid.
template <class Text>
class Registry {
 public:
  explicit Registry(detail::ExpressionType result) : result_(result) {}

  void add(std::string_view name, Text text, bool builtin, bool host_function) {
    if (name.empty()) refuse("name", "nothing", "a name");
    detail::check_callable_name("name", name);
    if (builtin) refuse("name", "\"" + std::string(name) + "\", which is built in", "another name");
    check_text("text", text.text);
    check_extras(text.extras);
    Entry<Text> entry{text, std::nullopt};
    if (!text.program.empty()) {
      if (host_function) refuse("program", "one beside a host function", "one of them");
      entry.program = detail::Expression::parse(text.program, text.extras, result_);
    }
    const std::unique_lock lock(mutex_);
    const auto [at, added] = texts_.try_emplace(std::string(name), std::move(entry));
    if (!added && at->second.text != text) {
      refuse("name", "\"" + std::string(name) + "\", under which another text is registered", "a name of its own");
    }
  }
  const Entry<Text>* find(std::string_view name) noexcept {
    if (name.empty()) return nullptr;
    const std::shared_lock lock(mutex_);
    const auto at = texts_.find(name);
    return at != texts_.end() ? &at->second : nullptr;
  }

 private:
  std::shared_mutex mutex_;
  std::map<std::string, Entry<Text>, std::less<>> texts_;
  detail::ExpressionType result_;
};

Registry<ScoreText>& scores() {
  static Registry<ScoreText> held(detail::ExpressionType::real);
  return held;
}
Registry<MaskText>& masks() {
  static Registry<MaskText> held(detail::ExpressionType::truth);
  return held;
}

}  // namespace

void register_score(std::string_view name, ScoreText text) {
  if (text.derivative_text) check_text("derivative_text", *text.derivative_text);
  const bool host_function = text.value != nullptr;
  scores().add(name, std::move(text), builtin_score(name).has_value(), host_function);
}
void register_mask(std::string_view name, MaskText text) {
  const bool host_function = text.visible != nullptr;
  masks().add(name, std::move(text), builtin_mask(name).has_value(), host_function);
}
const ScoreText* registered_score(std::string_view name) noexcept {
  const auto* entry = scores().find(name);
  return entry != nullptr ? &entry->text : nullptr;
}
const MaskText* registered_mask(std::string_view name) noexcept {
  const auto* entry = masks().find(name);
  return entry != nullptr ? &entry->text : nullptr;
}

namespace detail {

void check_callable_name(std::string_view argument, std::string_view name) {
  constexpr std::size_t kLongest = 64;
  const bool good = name.size() <= kLongest && std::all_of(name.begin(), name.end(), [](char c) {
                      return is_letter(c) || is_digit(c) || c == '-' || c == '.' || c == ':' || c == '/';
                    });
  if (!good) refuse(argument, "a name of other characters", "up to 64 of letters, digits and _ - . : /");
}

RegisteredCallables::RegisteredCallables(const Problem& problem) noexcept {
  if (const auto* entry = scores().find(problem.score)) {
    score = &entry->text;
    score_program = entry->program ? &*entry->program : nullptr;
  }
  if (const auto* entry = masks().find(problem.mask)) {
    mask = &entry->text;
    mask_program = entry->program ? &*entry->program : nullptr;
  }
}

HostCallables::HostCallables(const RegisteredCallables& registered, const Bindings& given, DeviceType device)
    : given_(given),
      registered_(registered),
      score_extras_(&given[extra_slot(0)], registered.score_extras()),
      mask_extras_(&given[extra_slot(registered.score_extras())], registered.mask_extras()) {
  if (device != DeviceType::cpu) return;
  const bool score = registered.score != nullptr && given.score.value == nullptr &&
                     (registered.score->value != nullptr || registered.score_program != nullptr);
  const bool mask = registered.mask != nullptr && given.mask.visible == nullptr &&
                    (registered.mask->visible != nullptr || registered.mask_program != nullptr);
  if (!score && !mask) return;
  filled_ = given;
  if (score && registered.score_program != nullptr) {
    const bool differentiable = registered.score_program->derivative >= 0;
    filled_->score = {program_value, differentiable ? program_derivative : nullptr, this};
  } else if (score) {
    filled_->score = {value, registered.score->derivative != nullptr ? derivative : nullptr, this};
  }
  if (mask && registered.mask_program != nullptr) {
    filled_->mask = {program_visible, program_classify, this};
  } else if (mask) {
    filled_->mask = {visible, nullptr, this};
  }
}

HostCallables::Program HostCallables::program_of(const ScoreFunction& score) noexcept {
  if (score.value != program_value) return {};
  const auto& me = *static_cast<const HostCallables*>(score.user);
  return {me.registered_.score_program, &me.score_extras_};
}

HostCallables::Program HostCallables::program_of(const MaskFunction& mask) noexcept {
  if (mask.visible != program_visible) return {};
  const auto& me = *static_cast<const HostCallables*>(mask.user);
  return {me.registered_.mask_program, &me.mask_extras_};
}

double HostCallables::program_value(double score, const ScorePoint& at, void* self) {
  const auto& me = *static_cast<const HostCallables*>(self);
  const Expression& program = *me.registered_.score_program;
  return program.real_at(program.value, score, at, me.score_extras_);
}

double HostCallables::program_derivative(double score, const ScorePoint& at, void* self) {
  const auto& me = *static_cast<const HostCallables*>(self);
  const Expression& program = *me.registered_.score_program;
  return program.real_at(program.derivative, score, at, me.score_extras_);
}

bool HostCallables::program_visible(const ScorePoint& at, void* self) {
  const auto& me = *static_cast<const HostCallables*>(self);
  return me.registered_.mask_program->truth_at(at, me.mask_extras_);
}

TileClass HostCallables::program_classify(const TileBounds& tile, void* self) {
  const auto& me = *static_cast<const HostCallables*>(self);
  return me.registered_.mask_program->classify(tile, me.mask_extras_);
}

double HostCallables::value(double score, const ScorePoint& at, void* self) {
  const auto& me = *static_cast<const HostCallables*>(self);
  return me.registered_.score->value(score, at, me.score_extras_, me.registered_.score->user);
}

double HostCallables::derivative(double score, const ScorePoint& at, void* self) {
  const auto& me = *static_cast<const HostCallables*>(self);
  return me.registered_.score->derivative(score, at, me.score_extras_, me.registered_.score->user);
}

bool HostCallables::visible(const ScorePoint& at, void* self) {
  const auto& me = *static_cast<const HostCallables*>(self);
  return me.registered_.mask->visible(at, me.mask_extras_, me.registered_.mask->user);
}

}  // namespace detail
}  // namespace tessera
