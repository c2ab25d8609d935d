/** The page: its link to the server, its panes, its keys. */

import { BatchPanel, LoadPanel } from "./batch.js";
import { addressOf, Link } from "./link.js";
import { Pane } from "./pane.js";
import { samplingOf } from "./sampling.js";

const MOST_PANES = 8;

const byId = (id) => document.getElementById(id);
const { url, token } = addressOf(location.href);
const link = new Link(url, token);
const batch = new BatchPanel();
new LoadPanel(link);

const panes = [];
let numbered = 0;

function addPane({ focus = true } = {}) {
  if (panes.length >= MOST_PANES) return;
  const pane = new Pane(link, samplingOf, ++numbered, removePane);
  panes.push(pane);
  byId("panes").append(pane.element);
  byId("add-pane").disabled = panes.length >= MOST_PANES;
  if (focus) pane.prompt.focus();
}

function removePane(pane) {
  panes.splice(panes.indexOf(pane), 1);
  pane.element.remove();
  byId("add-pane").disabled = false;
  if (panes.length === 0) addPane();
}

byId("add-pane").addEventListener("click", () => addPane());
byId("send-all").addEventListener("click", () => panes.forEach((pane) => pane.send()));
byId("stop-all").addEventListener("click", () => panes.forEach((pane) => pane.stop()));
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.ctrlKey && event.shiftKey) panes.forEach((pane) => pane.send());
  if (event.key === "Escape") panes.forEach((pane) => pane.stop());
});

const status = byId("status");
link.addEventListener("change", () => {
  status.dataset.state = link.state;
  status.textContent = link.words;
  byId("retry").hidden = link.state !== "waiting";
  byId("token-form").hidden = link.state !== "stopped";
});
link.addEventListener("open", () => batch.follow(link.client));
byId("retry").addEventListener("click", () => link.retry());
byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  link.retry(byId("token").value);
  byId("token").value = "";
});
addEventListener("online", () => link.retry());

addPane({ focus: false });
link.run();
