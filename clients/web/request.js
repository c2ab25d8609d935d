/**
 * What a request can hold: what JSON and msgpack carry alike. JSON would turn NaN into null, which counts as absent, and
 * a Date into a string; msgpack would turn half a surrogate pair into bytes that are no text.
 */

import { WsbatchError } from "./errors.js";

const MAX_DEPTH = 64; // more than any request needs; what holds itself has no end

/** Throws a WsbatchError with the code bad_request, naming the first value that has no form of its own in a frame. */
export function checkRequest(request) {
  const problem = problemIn(request, 0);
  if (problem !== null) throw new WsbatchError("bad_request", problem.replace(/^(\.|: )/, ""), { status: 400 });
}

/** The path to the first value that cannot be sent, and why; null where there is none. */
function problemIn(value, depth) {
  switch (typeof value) {
    case "number":
      return Number.isFinite(value) ? null : `: must be a finite number, got ${value}`;
    case "string":
      return isText(value) ? null : ": is not valid Unicode: half of a surrogate pair stands alone";
    case "boolean":
      return null;
    case "object":
      if (value === null) return null;
      if (depth > MAX_DEPTH) return ": is nested too deeply";
      if (Array.isArray(value)) return problemInArray(value, depth);
      if (kindOf(value) === "Object" && typeof value.toJSON !== "function") return problemInMap(value, depth);
      return refusal(`a ${kindOf(value)}`);
    default:
      return refusal(value === undefined ? "undefined" : `a ${typeof value}`);
  }
}

function problemInArray(items, depth) {
  for (let index = 0; index < items.length; index++) {
    const problem = problemIn(items[index], depth + 1);
    if (problem !== null) return `[${index}]${problem}`;
  }
  return null;
}

/** A field that is undefined is absent. */
function problemInMap(map, depth) {
  for (const [name, value] of Object.entries(map)) {
    if (!isText(name)) return `: the name of a field is not valid Unicode`;
    const problem = value === undefined ? null : problemIn(value, depth + 1);
    if (problem !== null) return `.${name}${problem}`;
  }
  return null;
}

const isText = (string) => !/\p{Surrogate}/u.test(string); // with `u`, a whole pair is one character and no surrogate
const kindOf = (value) => Object.prototype.toString.call(value).slice(8, -1);
const refusal = (got) => `: must be a number, a string, a boolean, null, an array or a plain object, got ${got}`;
