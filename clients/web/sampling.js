/** The sampling controls: from the form to the fields of a request. */

const form = document.getElementById("sampling-form");
const summary = document.getElementById("sampling-summary");

/** The request fields that the form asks for, or null where a value is out of its bounds: the form then shows it. */
export function samplingOf() {
  if (!form.checkValidity()) {
    document.getElementById("sampling").open = true;
    form.reportValidity();
    return null;
  }
  const number = (name) => (form[name].value === "" ? undefined : Number(form[name].value));
  const stop = form.stop.value.split("\n").filter((line) => line !== "");
  return {
    temperature: number("temperature"),
    top_p: number("top_p"),
    top_k: number("top_k"),
    seed: number("seed"),
    max_tokens: number("max_tokens"),
    stop: stop.length > 0 ? stop : undefined,
  };
}

function summarise() {
  const shown = ["temperature", "top_p", "top_k", "max_tokens", "seed"]
    .filter((name) => form[name].value !== "" && !(name === "top_k" && form[name].value === "0"))
    .map((name) => `${name} ${form[name].value}`);
  summary.textContent = shown.join(", ");
}

form.addEventListener("input", summarise);
form.addEventListener("submit", (event) => event.preventDefault());
summarise();
