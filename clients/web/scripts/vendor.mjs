// Makes vendor/msgpack.js: the minified build of @msgpack/msgpack, licence in front, wrapped as one ES module, so that
// a browser fetches one file instead of twenty. `--check` fails where what is committed is not what this would write.
import { readFile, writeFile } from "node:fs/promises";

const source = new URL("../node_modules/@msgpack/msgpack/", import.meta.url);
const target = new URL("../vendor/msgpack.js", import.meta.url);

const { version } = JSON.parse(await readFile(new URL("package.json", source), "utf8"));
const licence = (await readFile(new URL("LICENSE", source), "utf8")).trim();
const build = await readFile(new URL("dist.umd/msgpack.min.js", source), "utf8");
const text = `// @msgpack/msgpack ${version}, its minified build as an ES module; made by scripts/vendor.mjs.
/*
${licence}
*/
const module = { exports: {} };
const exports = module.exports;
${build.replace(/\n?\/\/# sourceMappingURL=.*/, "").trim()}
export const { encode, decode } = module.exports;
`;

if (process.argv.includes("--check")) {
  if ((await readFile(target, "utf8")) !== text) {
    console.error("vendor/msgpack.js is not what `npm run vendor` makes");
    process.exit(1);
  }
} else {
  await writeFile(target, text);
}
