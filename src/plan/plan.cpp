// SPDX-License-Identifier: Apache-2.0
// Walks the table of implementations and keeps every refusal with its reason.
#include "tessera/plan.h"

#include <algorithm>

#include "base/checked.h"
#include "plan/implementations.h"
#include "problem/operation.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using detail::backend;
using detail::Implementation;
using detail::PlanState;

void check_wishes(const Wishes& wishes) {
  const struct {
    const char* name;
    const std::optional<std::int64_t>& value;
  } counts[] = {{"tile_q", wishes.tile_q},
                {"tile_kv", wishes.tile_kv},
                {"splits", wishes.splits},
                {"stages", wishes.stages},
                {"warps", wishes.warps}};
  for (const auto& count : counts) {
    if (count.value && (*count.value < 1 || *count.value > detail::kMaxSize)) {
      throw Error(ErrorCode::invalid_argument, count.name, std::to_string(*count.value), "1 or more");
    }
  }
}

Support row_supports(const Implementation& row, const Problem& problem, const Target& target, const Wishes& wishes) {
  const std::string_view name = row.name;
  if (!wishes.implementation.empty() && wishes.implementation != name) {
    return Support::no("the wish is implementation=" + wishes.implementation);
  }
  if (row.by_name_only && wishes.implementation.empty()) {
    return Support::no("only on request, with implementation=" + std::string(name));
  }
  if (const Support support = backend(row.device).supports(wishes); !support) return support;
  if (row.device != target.device) {
    return Support::no(std::string("runs on ") + backend(row.device).name() + ", the target is " + target.to_string());
  }
  const detail::OperationRules& operation = detail::rules_of(problem.operation);
  if (operation.is_defined != nullptr) {
    if (const Support defined = operation.is_defined(problem); !defined) return defined;
  }
  if (row.operation && *row.operation != problem.operation) {
    return Support::no("does " + std::string(detail::name_of(*row.operation)) + " only");
  }
  if (row.pass && *row.pass != problem.pass) {
    return Support::no(*row.pass == Pass::forward ? "does the forward only" : "does the backward only");
  }
  return row.supports(problem, target, wishes);
}

/// The first row that supports the problem, or nullptr. Every row gets a Candidate, also those after the chosen one, so
/// that explain() is complete.
const Implementation* choose(const Problem& problem, const Target& target, const Wishes& wishes,
                             std::vector<Candidate>& candidates) {
  const Implementation* chosen = nullptr;
  bool known = wishes.implementation.empty();
  for (const Implementation* row : detail::implementations()) {
    known = known || wishes.implementation == row->name;
    Support support = row_supports(*row, problem, target, wishes);
    if (support && chosen == nullptr) chosen = row;
    candidates.push_back({row->name, std::move(support)});
  }
  if (!known) {
    candidates.push_back({wishes.implementation, Support::no("there is no implementation of this name")});
  }
  return chosen;
}

/// Whether a row's refusal tells what to change. It does not if the row is for another device, operation or pass.
bool is_concerned(std::string_view name, const Problem& problem, const Target& target, const Wishes& wishes) {
  if (!wishes.implementation.empty()) return name == wishes.implementation;
  for (const Implementation* row : detail::implementations()) {
    if (row->name != name) continue;
    return row->device == target.device && row->operation == problem.operation &&
           (!row->pass || *row->pass == problem.pass);
  }
  return true;
}

/// Why no row supports the problem: "cuda.fwd_wgmma, cuda.fwd_mma: wants SM80 or newer". Rows with the same reason are
/// named together.
std::string reasons(const std::vector<Candidate>& candidates, const Problem& problem, const Target& target,
                    const Wishes& wishes) {
  std::vector<std::pair<std::string, std::string>> by_reason;  // reason, names
  for (const Candidate& candidate : candidates) {
    if (!is_concerned(candidate.name, problem, target, wishes)) continue;
    const auto same = [&](const auto& each) { return each.first == candidate.support.reason; };
    const auto at = std::find_if(by_reason.begin(), by_reason.end(), same);
    if (at == by_reason.end()) {
      by_reason.emplace_back(candidate.support.reason, candidate.name);
    } else {
      at->second += ", " + candidate.name;
    }
  }
  std::string text;
  for (const auto& [reason, names] : by_reason) {
    text.append(text.empty() ? "" : "; ").append(names).append(": ").append(reason);
  }
  return text;
}

/// The end of the error for a refused problem: the row that would take it without the wishes, or on the CPU; "" if
/// there is none.
std::string what_would_do(const Problem& problem, const Target& target, const Wishes& wishes) {
  std::vector<Candidate> ignored;
  if (wishes != Wishes{}) {
    const Implementation* row = choose(problem, target, {}, ignored);
    return row == nullptr ? "" : "; without the wishes " + std::string(row->name) + " takes it";
  }
  if (target.device == DeviceType::cpu) return "";
  const Implementation* row = choose(problem, backend(DeviceType::cpu).resolve({}), {}, ignored);
  return row == nullptr ? "" : "; " + std::string(row->name) + " takes it on the CPU";
}

std::string indented(std::string_view text, std::string_view indent) {
  std::string out;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    if (!line.empty()) out.append(indent).append(line).append("\n");
  }
  return out;
}

}  // namespace

Plan make_plan(const Problem& problem, const Target& target, const Wishes& wishes) {
  problem.check();
  check_wishes(wishes);
  auto state = std::make_shared<PlanState>();
  state->problem = problem;
  state->callables = detail::RegisteredCallables(problem);
  state->rules = detail::slot_rules(problem);
  state->backend = &backend(target.device);
  state->target = state->backend->resolve(target);
  state->wishes = wishes;
  state->implementation = choose(problem, state->target, wishes, state->candidates);
  if (state->implementation == nullptr) {
    throw Error(ErrorCode::unsupported, "problem", problem.to_string() + " on " + state->target.to_string(),
                "what an implementation there supports (" + reasons(state->candidates, problem, state->target, wishes) +
                    ")" + what_would_do(problem, state->target, wishes));
  }
  state->implementation_name = state->implementation->name;
  state->backend->plan(*state);
  return Plan(std::move(state));
}

Support supports(const Problem& problem, const Target& target, const Wishes& wishes) {
  problem.check();
  try {
    check_wishes(wishes);
    std::vector<Candidate> candidates;
    if (choose(problem, backend(target.device).resolve(target), wishes, candidates) == nullptr) {
      return Support::no(reasons(candidates, problem, target, wishes));
    }
  } catch (const Error& error) {
    return Support::no(error.what());
  }
  return Support::yes();
}

const Problem& Plan::problem() const noexcept { return state_->problem; }
const Target& Plan::target() const noexcept { return state_->target; }
const std::string& Plan::implementation() const noexcept { return state_->implementation_name; }
std::size_t Plan::workspace_bytes() const noexcept { return state_->workspace_bytes; }
const std::vector<Candidate>& Plan::candidates() const noexcept { return state_->candidates; }

std::string Plan::explain() const {
  const PlanState& s = *state_;
  std::string text = "problem:        " + s.problem.to_string() + "\ntarget:         " + s.target.to_string();
  const std::string wishes = s.wishes.to_string();
  if (!wishes.empty()) text += "\nwishes:         " + wishes;
  text += "\nimplementation: " + s.implementation_name + "\n";
  if (s.tile_q > 0 || s.tile_kv > 0) {
    text += "tiles:          " + std::to_string(s.tile_q) + " query rows x " + std::to_string(s.tile_kv) + " keys\n";
    text += "splits:         " + std::to_string(s.splits) + "\n";
  }
  text += "workspace:      " + std::to_string(s.workspace_bytes) + " bytes\n";
  text += "promises:       ";
  text += s.fixed_order ? "the same bits in every run" : "not the same bits in every run, unless deterministic";
  text += s.problem.batch_invariant ? ", and whatever shares the batch\n" : "\n";
  const auto program = [&](const char* kind, const auto* callable) {
    if (callable != nullptr && !callable->program.empty()) text += std::string(kind) + callable->program + "\n";
  };
  program("score:          ", s.callables.score);
  program("mask:           ", s.callables.mask);
  if (!s.choice.empty()) text += "choices:\n" + indented(s.choice, "  ");
  std::string refused;
  for (const Candidate& candidate : s.candidates) {
    if (!candidate.support) refused += "  " + candidate.name + ": " + candidate.support.reason + "\n";
  }
  if (!refused.empty()) text += "refused:\n" + refused;
  return text;
}

}  // namespace tessera
