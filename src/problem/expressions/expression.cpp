// SPDX-License-Identifier: Apache-2.0
// Reads and checks the text form of an expression.
#include "problem/expressions/expression.h"

#include <charconv>
#include <iterator>
#include <string>
#include <utility>

#include "tessera/error.h"

namespace tessera::detail {
namespace {

using Op = ExpressionOp;
using Type = ExpressionType;

// Bits for the types that an operation takes.
constexpr int kReal = 1;
constexpr int kInteger = 2;
constexpr int kTruth = 4;

struct Name {
  std::string_view name;
  Op op;
  int operands;
  int types;       // that the operands may have; all have the same one
  int result = 0;  // 0: that of the operands
};

constexpr Name kNames[] = {
    {"float", Op::to_real, 1, kInteger | kTruth, kReal},
    {"int", Op::to_integer, 1, kReal | kTruth, kInteger},
    {"neg", Op::negate, 1, kReal | kInteger},
    {"abs", Op::absolute, 1, kReal | kInteger},
    {"not", Op::invert, 1, kInteger | kTruth},
    {"floor", Op::floor, 1, kReal},
    {"ceil", Op::ceil, 1, kReal},
    {"trunc", Op::trunc, 1, kReal},
    {"exp", Op::exp, 1, kReal},
    {"log", Op::log, 1, kReal},
    {"sqrt", Op::sqrt, 1, kReal},
    {"tanh", Op::tanh, 1, kReal},
    {"sin", Op::sin, 1, kReal},
    {"cos", Op::cos, 1, kReal},
    {"add", Op::add, 2, kReal | kInteger},
    {"sub", Op::subtract, 2, kReal | kInteger},
    {"mul", Op::multiply, 2, kReal | kInteger},
    {"div", Op::divide, 2, kReal | kInteger},
    {"mod", Op::remainder, 2, kReal | kInteger},
    {"min", Op::minimum, 2, kReal | kInteger},
    {"max", Op::maximum, 2, kReal | kInteger},
    {"pow", Op::power, 2, kReal},
    {"and", Op::bit_and, 2, kInteger | kTruth},
    {"or", Op::bit_or, 2, kInteger | kTruth},
    {"xor", Op::bit_xor, 2, kInteger | kTruth},
    {"shl", Op::shift_left, 2, kInteger},
    {"shr", Op::shift_right, 2, kInteger},
    {"lt", Op::less, 2, kReal | kInteger, kTruth},
    {"le", Op::less_equal, 2, kReal | kInteger, kTruth},
    {"eq", Op::equal, 2, kReal | kInteger, kTruth},
    {"ne", Op::not_equal, 2, kReal | kInteger, kTruth},
    {"select", Op::select, 3, kReal | kInteger},
};

constexpr std::pair<std::string_view, Op> kInputs[] = {
    {"score", Op::score}, {"batch", Op::batch}, {"head", Op::head}, {"query", Op::query}, {"key", Op::key}};

int bit_of(Type type) { return 1 << static_cast<int>(type); }
Type type_of_bit(int bit) { return bit == kReal ? Type::real : bit == kInteger ? Type::integer : Type::truth; }

class Reader {
 public:
  Reader(std::string_view text, const std::vector<ExtraTensor>& extras, Type result)
      : rest_(text), extras_(extras), result_(result) {}

  Expression read() {
    while (!rest_.empty()) {
      const std::size_t end = rest_.find(';');
      step_ = rest_.substr(0, end);
      rest_ = end == std::string_view::npos ? std::string_view{} : rest_.substr(end + 1);
      words_ = step_;
      read_step(word());
      if (!words_.empty()) refuse("no further words");
    }
    if (e_.value < 0) refuse("a result");
    mark(e_.value);
    return std::move(e_);
  }

 private:
  [[noreturn]] void refuse(const std::string& want) const {
    throw Error(ErrorCode::invalid_argument, "program",
                "step " + std::to_string(e_.steps.size()) + ", \"" + std::string(step_) + "\"", want);
  }

  std::string_view word() {
    const std::size_t end = words_.find(' ');
    const std::string_view found = words_.substr(0, end);
    words_ = end == std::string_view::npos ? std::string_view{} : words_.substr(end + 1);
    return found;
  }

  std::int64_t number() {
    const std::string_view text = word();
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (text.empty() || error != std::errc{} || end != text.data() + text.size()) refuse("an integer");
    return value;
  }

  std::uint16_t operand() {
    const std::int64_t from = number();
    if (from < 0 || from >= static_cast<std::int64_t>(e_.steps.size())) refuse("operands of earlier steps");
    return static_cast<std::uint16_t>(from);
  }

  const ExpressionStep& at(int step) const { return e_.steps[static_cast<std::size_t>(step)]; }

  void read_step(std::string_view name) {
    if (name == "value" || name == "derivative") return read_result(name == "value" ? e_.value : e_.derivative);
    if (e_.value >= 0) refuse("the results at the end");
    if (e_.steps.size() >= Expression::kMostSteps)
      refuse("at most " + std::to_string(Expression::kMostSteps) + " steps");
    ExpressionStep step;
    if (name.starts_with("const.")) {
      read_constant(name.substr(6), step);
    } else if (!read_input(name, step)) {
      name == "load" ? read_load(step) : read_operation(name, step);
    }
    for (int i = 0; i < step.operands; ++i) step.axes |= at(step.from[i]).axes;
    e_.steps.push_back(step);
  }

  void read_result(int& which) {
    if (which >= 0) refuse("each result once");
    const Type want = &which == &e_.value ? result_ : Type::real;
    which = operand();
    if (at(which).type != want) refuse("a result of the other type");
    if (&which == &e_.derivative && result_ != Type::real) refuse("no derivative of a mask");
  }

  // Reads a number as Python's float.hex() writes it, or inf, nan; independent of the locale.
  float real(std::string_view text) const {
    const bool negative = text.starts_with('-');
    if (negative) text.remove_prefix(1);
    const bool hexadecimal = text.starts_with("0x");
    if (hexadecimal) text.remove_prefix(2);
    float value = 0.0F;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value,
                                              hexadecimal ? std::chars_format::hex : std::chars_format::general);
    if (error != std::errc() || end != text.data() + text.size()) refuse("a number");
    return negative ? -value : value;
  }

  void read_constant(std::string_view type, ExpressionStep& step) {
    if (type == "f") {
      step.real = static_cast<double>(real(word()));
      return;
    }
    if (type != "i" && type != "b") refuse("const.f, const.i or const.b");
    step.type = type == "i" ? Type::integer : Type::truth;
    step.integer = number();
    if (type == "b" && step.integer != 0 && step.integer != 1) refuse("0 or 1");
  }

  bool read_input(std::string_view name, ExpressionStep& step) {
    for (const auto& [known, op] : kInputs) {
      if (known != name) continue;
      step.op = op;
      step.type = op == Op::score ? Type::real : Type::integer;
      if (op == Op::score && result_ == Type::truth) refuse("no score in a mask");
      if (op == Op::score) step.axes = kChangesWithQuery | kChangesWithKey;
      if (op == Op::query || op == Op::head) step.axes = kChangesWithQuery;
      if (op == Op::key) step.axes = kChangesWithKey;
      return true;
    }
    return false;
  }

  void read_load(ExpressionStep& step) {
    const std::int64_t tensor = number();
    if (tensor < 0 || tensor >= static_cast<std::int64_t>(extras_.size())) refuse("the number of an extra tensor");
    const ExtraTensor& extra = extras_[static_cast<std::size_t>(tensor)];
    step.op = Op::load;
    step.tensor = static_cast<std::int16_t>(tensor);
    step.operand = Type::integer;
    const bool real = extra.dtype == DType::fp32 || extra.dtype == DType::fp16 || extra.dtype == DType::bf16;
    step.type = real ? Type::real : Type::integer;
    for (; step.operands < extra.rank; ++step.operands) {
      step.from[step.operands] = operand();
      if (at(step.from[step.operands]).type != Type::integer) refuse("indices that are integers");
    }
  }

  void read_operation(std::string_view name, ExpressionStep& step) {
    const Name* found = nullptr;
    for (const Name& known : kNames) {
      if (known.name == name) found = &known;
    }
    if (found == nullptr) refuse("an operation that there is");
    step.op = found->op;
    step.operands = static_cast<std::uint8_t>(found->operands);
    for (int i = 0; i < found->operands; ++i) step.from[i] = operand();
    step.operand = at(step.from[found->operands - 1]).type;
    for (int i = 0; i < found->operands; ++i) {
      const bool condition = found->op == Op::select && i == 0;
      const Type type = at(step.from[i]).type;
      if (condition ? type != Type::truth : type != step.operand || (found->types & bit_of(type)) == 0) {
        refuse("operands of types that the operation has");
      }
    }
    step.type = found->result == 0 ? step.operand : type_of_bit(found->result);
  }

  // Marks a step and all that it needs. One pass backwards is enough, because operands precede the steps that use them.
  void mark(int step) {
    e_.steps[static_cast<std::size_t>(step)].in_value = true;
    for (int i = step; i >= 0; --i) {
      const ExpressionStep& used = at(i);
      if (!used.in_value) continue;
      for (int k = 0; k < used.operands; ++k) e_.steps[used.from[k]].in_value = true;
    }
  }

  std::string_view rest_, step_, words_;
  const std::vector<ExtraTensor>& extras_;
  Type result_;
  Expression e_;
};

}  // namespace

Expression Expression::parse(std::string_view text, const std::vector<ExtraTensor>& extras, ExpressionType result) {
  return Reader(text, extras, result).read();
}

}  // namespace tessera::detail
